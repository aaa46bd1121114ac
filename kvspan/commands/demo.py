"""The command `demo`: start a pair, ask one question, print the answer and where its time went, stop.

The pair listens on unix sockets in a directory that is removed at the end, so that it meets no other.
"""

from __future__ import annotations

import asyncio
from typing import Any

import click

from common.settings import SECONDS
from decode_service.config import DecodeConfig
from kvspan.commands.flags import settings_of
from kvspan.commands.pair import socket_folder
from kvspan.commands.streams import note
from kvspan.commands.timings import timings_line
from kvspan.commands.up import PairReady, make_plan, run_pair
from prefill_service.config import PrefillConfig


@click.command("demo")
@click.argument("question")
@settings_of(
    DecodeConfig,
    PrefillConfig,
    without=("prefill", "listen"),
    defaults={"model": "demo", "log_level": "warning"},
)
@click.option(
    "--ready-timeout-s",
    type=SECONDS,
    default=600,
    metavar="SECONDS",
    show_default=True,
    help="how long fetching, loading and the first session may take",
)
def demo(question: str, ready_timeout_s: float, **given: Any) -> int:
    """Start a pair, ask it one QUESTION, and stop."""
    with socket_folder() as folder:
        plan = make_plan({**given, "listen": f"unix:{folder}/decode.sock"}, f"unix:{folder}/prefill.sock")
        _note("starting a prefill and a decode service ...")
        return asyncio.run(run_pair(plan, ready_timeout_s, lambda ready: _ask(ready, question)))


async def _ask(ready: PairReady, question: str) -> None:
    """Stream the answer to stdout and tell the pair to end."""
    from kvspan.client import AsyncClient

    _note(f"question: {question}")
    last = None
    async with AsyncClient(ready.decode) as client:
        async for last in client.generate(messages=[{"role": "user", "content": question}]):
            print(last.text, end="", flush=True)
    print(flush=True)
    if last is not None:
        print(timings_line(last), flush=True)
    ready.ending.set()


def _note(text: str) -> None:
    note(f"kvspan: {text}")
