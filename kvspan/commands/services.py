"""The commands `prefill` and `decode`: one service in this process, until a signal ends it.

Theory of operation: the service tells `ready ADDR` on stdout once it serves; all else it says goes to stderr.
One SIGTERM or SIGINT shuts it down and the exit code is 0, a second ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Coroutine

from common.runtime import end_with_parent
from common.telemetry.logging import configure_logging
from decode_service.config import DecodeConfig
from kvspan.commands.command import EXIT_FAILED, EXIT_OK, Command
from kvspan.commands.flags import ServiceConfig, add_flags, build_config, given_texts
from prefill_service.config import PrefillConfig

PARENT_FLAG = "--end-with-parent"
"""Given by `up` to its children, with its own process id."""


LOG_LEVELS = ("debug", "info", "warning", "error")


def announce(address: str) -> None:
    """Tell on stdout that a service serves at `address`; whoever started the process waits for this line."""
    print(f"ready {address}", flush=True)


def add_log_flags(parser: argparse.ArgumentParser, default: str = "info") -> None:
    """Add the flags that say what is logged and how."""
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default=default,
        help="least level that is logged (default: %(default)s)",
    )
    parser.add_argument("--log-json", action="store_true", help="log one JSON object a line")


def log_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return the command line that makes another process log in the same way."""
    return [f"--log-level={arguments.log_level}", *(["--log-json"] if arguments.log_json else [])]


def _add_arguments(parser: argparse.ArgumentParser, kind: type[ServiceConfig]) -> None:
    add_flags(parser, kind)
    add_log_flags(parser)
    parser.add_argument(PARENT_FLAG, type=int, default=None, help=argparse.SUPPRESS, dest="parent_pid")


def _is_wanted(arguments: argparse.Namespace, name: str) -> bool:
    """Start to log, tie this process to its parent, and tell whether that parent still lives."""
    configure_logging(name, arguments.log_level, json=arguments.log_json)
    return arguments.parent_pid is None or end_with_parent(arguments.parent_pid)


def _run_prefill(arguments: argparse.Namespace) -> int:
    config = build_config(PrefillConfig, given_texts(arguments))
    if not _is_wanted(arguments, "prefill"):
        return EXIT_FAILED
    from prefill_service.app import serve

    return _run_service(serve(config, announce))


def _run_decode(arguments: argparse.Namespace) -> int:
    config = build_config(DecodeConfig, given_texts(arguments))
    if not _is_wanted(arguments, "decode"):
        return EXIT_FAILED
    from decode_service.app import serve

    return _run_service(serve(config, announce))


def _run_service(service: Coroutine[None, None, None]) -> int:
    asyncio.run(service)
    # Everything that has to end has ended. Without this the interpreter searches all modules of torch and
    # transformers for garbage while it exits, which takes seconds that whoever stops a service waits for.
    gc.freeze()
    return EXIT_OK


PREFILL = Command(
    "prefill",
    "serve prompts: compute their KV and stream it into the slab of a decode service",
    lambda parser: _add_arguments(parser, PrefillConfig),
    _run_prefill,
)

DECODE = Command(
    "decode",
    "serve clients: generate from KV that prefill services computed",
    lambda parser: _add_arguments(parser, DecodeConfig),
    _run_decode,
)
