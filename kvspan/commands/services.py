"""The commands `prefill` and `decode`: one service in this process, until a signal ends it.

Theory of operation: the service tells `ready ADDR` on stdout once it serves; all else it says goes to stderr.
One SIGTERM or SIGINT shuts it down and the exit code is 0, a second ends it at once.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import click

from common.errors import ConfigError
from common.preflight import check_host
from common.runtime.lifecycle import end_with_parent
from common.settings import ServiceConfig
from common.telemetry.logging import configure_logging
from decode_service.config import DecodeConfig
from kvspan.commands.command import EXIT_FAILED, EXIT_OK, EXIT_USAGE, tell
from kvspan.commands.flags import make_config, refusal_text, settings_of
from prefill_service.config import PrefillConfig

READY, REFUSED = "ready ", "refused "
"""How the lines begin that a service writes to stdout."""

PARENT_FLAG = "--end-with-parent"
"""Given by `up` to its children, with its own process id."""


@click.command("prefill")
@settings_of(PrefillConfig)
@click.option(PARENT_FLAG, "parent_pid", type=int, hidden=True)
def prefill(parent_pid: int | None, **given: Any) -> int:
    """Serve prompts: compute their KV and stream it into the slab of a decode service."""
    config = make_config(PrefillConfig, given)
    check_host(config)
    if not _is_wanted("prefill", config, parent_pid):
        return EXIT_FAILED
    with _told_parent(parent_pid):
        from prefill_service.app import serve

        return _run_service(serve(config, announce))


@click.command("decode")
@settings_of(DecodeConfig)
@click.option(PARENT_FLAG, "parent_pid", type=int, hidden=True)
def decode(parent_pid: int | None, **given: Any) -> int:
    """Serve clients: generate from KV that prefill services computed."""
    config = make_config(DecodeConfig, given)
    check_host(config)
    if not _is_wanted("decode", config, parent_pid):
        return EXIT_FAILED
    with _told_parent(parent_pid):
        from decode_service.app import serve

        return _run_service(serve(config, announce))


def announce(address: str) -> None:
    """Tell on stdout that a service serves at `address`; whoever started the process waits for this line."""
    tell(f"{READY}{address}")


@contextmanager
def _told_parent(parent_pid: int | None) -> Iterator[None]:
    """Leave it to the parent to say what is refused: both services of a pair would say the same."""
    try:
        yield
    except ConfigError as error:
        if parent_pid is None:
            raise
        print(f"{REFUSED}{' '.join(refusal_text(error).split())}", flush=True)
        raise click.exceptions.Exit(EXIT_USAGE) from error


def _is_wanted(name: str, config: ServiceConfig, parent_pid: int | None) -> bool:
    """Start to log, tie this process to its parent, and tell whether that parent still lives."""
    stream = click.get_current_context().obj
    configure_logging(name, config.log_level, json=config.log_json, stream=stream)
    return parent_pid is None or end_with_parent(parent_pid)


def _run_service(service: Coroutine[None, None, None]) -> int:
    # What was imported lives as long as the process: no search for garbage while the model is loaded, nor
    # while requests are served, need look at it again.
    gc.freeze()
    asyncio.run(service)
    # Everything that has to end has ended. Without this the interpreter searches all modules of torch and
    # transformers for garbage while it exits, which takes seconds that whoever stops a service waits for.
    gc.freeze()
    return EXIT_OK
