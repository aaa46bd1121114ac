"""What a run was made on: processor, versions, load."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("kvspan", "torch", "transformers", "grpcio", "protobuf", "numpy", "xxhash")


def describe_environment() -> dict[str, Any]:
    """Return what may explain a number, as JSON values."""
    cpu = _cpu_fields(Path("/proc/cpuinfo"))
    return {
        "cpu_model": cpu.get("model name", platform.machine()),
        "cpu_flags": cpu.get("flags", cpu.get("Features", "")).split(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": _commit(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def process_cpu_s(pid: int, proc: Path = Path("/proc")) -> float:
    """Return the CPU time that a process has used, in user and kernel, by all its threads."""
    text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    # The name in parentheses may hold anything; the fields after it are counted from the state, field 3.
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cpu_fields(path: Path) -> dict[str, str]:
    """Return the fields of the first processor."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = text.partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _commit() -> str:
    """Return the commit of the source tree, with a mark when files differ from it; empty without one."""
    folder = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=folder, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()
