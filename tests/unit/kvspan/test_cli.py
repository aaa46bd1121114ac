"""The command line answers at once, and every outcome has its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from common.errors import ConfigError, PeerUnavailable
from common.model.folder.source import TinyFamily
from common.model.progress import shown_progress
from common.model.tiny import make_byte_tokenizer, make_tiny, tiny_config
from kvspan import cli
from kvspan.commands.command import EXIT_FAILED, EXIT_OK, EXIT_USAGE, CommandFailed
from kvspan.start import EXIT_INTERRUPTED

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "transformers", "grpc", "numpy")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvspan --help` is the list of what there is."""
    code = cli.main(["--help"])

    text = capsys.readouterr().out
    assert code == EXIT_OK
    assert all(f"  {command.name} " in text and str(command.help)[:30] in text for command in cli.COMMANDS)


def test_command_line_loads_nothing_heavy_before_it_runs() -> None:
    """Help and a bad value answer at once: no compute or network library is loaded for them."""
    code = (
        "import sys; from kvspan import cli; code = cli.main(['up', '--model=tiny:none']);"
        f"print(code, [name for name in {HEAVY} if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)

    assert done.stdout.strip() == f"{EXIT_USAGE} []"


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        (["up", "--lanes=0"], "Invalid value for '--lanes': 0 is not in the range 1<=x<=4096."),
        (
            ["decode", "--model=demo", "--listen=50051"],
            "Invalid value for '--listen': '50051' must be host:port",
        ),
        (["up", "--chunk-tokens=100"], "--page-tokens=64: must divide --chunk-tokens=100"),
        (["up", "--min-span-bytes=9MiB"], "--min-span-bytes=9437184: must not exceed --max-span-bytes=1MiB"),
        (["up", "--time-limit-s=1e12"], "Invalid value for '--time-limit-s': 1000000000000.0 is not in the"),
        (
            ["up", "--ready-timeout-s=0"],
            "Invalid value for '--ready-timeout-s': 0.0 is not in the range 0<x<=",
        ),
        (["health", "nowhere"], "Invalid value for 'TARGET': 'nowhere' must be host:port or unix:PATH"),
        (["fly"], "No such command 'fly'. See kvspan --help."),
        (["decode", "--model=demo"], "Missing option '--listen'. See kvspan decode --help."),
        (["up", "--lan=3"], "No such option '--lan'. (Did you mean one of: '--lanes',"),
        (["up", "now"], "Got unexpected extra argument (now) See kvspan up --help."),
    ],
)
def test_bad_value_is_refused_before_anything_starts(
    line: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong is one line on stderr that names flag, text and rule; the exit code is 2."""
    code = cli.main(line)

    captured = capsys.readouterr()
    assert code == EXIT_USAGE
    assert captured.err.startswith(f"kvspan: {refusal}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_bad_value_of_the_environment_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody looks for a flag that was never typed."""
    monkeypatch.setenv("KVSPAN_LANES", "0")

    assert cli.main(["up"]) == EXIT_USAGE
    assert capsys.readouterr().err.endswith("in the range 1<=x<=4096. It comes from KVSPAN_LANES.\n")


def test_no_command_at_all_is_answered_with_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever types only the name learns what there is."""
    assert cli.main([]) == EXIT_USAGE
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_standard_streams_that_were_closed_lead_nowhere(closed: str, tmp_path: Path) -> None:
    """A service manager may start a program without them; no socket or file of ours takes their numbers."""
    code = (
        "import atexit, os, sys\n"
        "def tell():\n"
        "    with open(sys.argv[1], 'w') as told:\n"
        "        for number in range(3): print(os.readlink(f'/proc/self/fd/{number}'), file=told)\n"
        "atexit.register(tell)\n"
        "from kvspan import cli; cli.main(['decode', '--log-json'])\n"
    )
    told = tmp_path / "told"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code, str(told)]

    with (tmp_path / "open").open("w") as file:
        done = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=ROOT
        )

    expected = ["/dev/null" if f"{number}" in closed else file.name for number in range(3)]
    assert done.returncode == 0
    assert told.read_text().splitlines() == ["/dev/null", *expected[1:]]


def failing_with(error: BaseException) -> click.Command:
    """Return a command that raises `error`."""

    def run() -> int:
        raise error

    return click.Command("fail", callback=run)


@pytest.mark.parametrize(
    ("error", "code", "complaint"),
    [
        (ConfigError("slab_bytes", 7, "is too small"), EXIT_USAGE, "kvspan: --slab-bytes=7: is too small\n"),
        (PeerUnavailable("no prefill"), EXIT_FAILED, "kvspan: PREFILL_UNAVAILABLE: no prefill\n"),
        (CommandFailed("said \x9b2J"), EXIT_FAILED, "kvspan: said \\x9b2J\n"),
        (KeyboardInterrupt(), EXIT_INTERRUPTED, ""),
    ],
)
def test_error_of_a_running_command_becomes_one_line_and_a_code(
    error: BaseException,
    code: int,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever ends a command, the operator reads one line and never a traceback."""
    monkeypatch.setattr(cli, "COMMANDS", (failing_with(error),))

    assert cli.main(["fail"]) == code
    assert capsys.readouterr().err == complaint


def run_json(*line: str, **environ: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a command that logs JSON in a process of its own; return exit code and every line of stderr."""
    command = [sys.executable, "-m", "kvspan.cli", *line]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environ}
    )
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("line", "environ", "problem"),
    [
        (["decode", "--log-json", "--lanes=0"], {}, "kvspan: Invalid value for '--lanes': 0 is not in"),
        (
            ["up", "--model=/no/such/folder"],
            {"KVSPAN_LOG_JSON": "1"},
            "kvspan: --model=/no/such/folder: no such",
        ),
    ],
)
def test_refusal_is_json_when_the_log_is(line: list[str], environ: dict[str, str], problem: str) -> None:
    """Whatever is wrong, also with the line itself: nothing but objects is on stderr."""
    code, (told,) = run_json(*line, **environ)

    assert code == EXIT_USAGE
    assert (told["event"], told["level"], told["exit_code"]) == ("command.failed", "ERROR", EXIT_USAGE)
    assert told["problem"].startswith(problem)


@pytest.mark.multiprocess
def test_what_libraries_say_when_the_interpreter_ends_is_json() -> None:
    """They say it through our log, or past it, after the command has ended."""
    code = (
        "import atexit, logging, os; from kvspan import cli; cli.main(['decode', '--log-json'])\n"
        "atexit.register(os.write, 2, b'bye\\n'); atexit.register(logging.warning, 'cache.told')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)

    events = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert sorted(events) == ["cache.told", "command.failed", "stderr.line"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_line_of_a_service_is_json_from_start_to_end(tmp_path: Path) -> None:
    """Row Y19: a folder is loaded, served and left, and warnings of libraries on the way are JSON too."""
    with shown_progress(False):
        make_tiny(tiny_config(TinyFamily.LLAMA), 5, torch.float32).save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    # A token that transformers warns about when it loads the tokenizer or the generation config.
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "do_sample": False}))
    command = [sys.executable, "-X", "dev", "-m", "kvspan.cli", "decode", f"--model={tmp_path}", "--log-json"]
    command += [f"--listen=unix:{tmp_path}/s", "--threads=1", "--cache-tokens=256"]

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == f"ready unix:{tmp_path}/s\n"
        service.terminate()
        _, err = service.communicate(timeout=60)

    events = [json.loads(line)["event"] for line in err.splitlines()]
    assert service.returncode == EXIT_OK
    assert {"service.ready", "service.stopped"} <= set(events)


def test_command_names_are_unique() -> None:
    """No command hides another."""
    names = [command.name for command in cli.COMMANDS]

    assert len(set(names)) == len(names)
