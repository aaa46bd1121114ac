"""The command `demo`: start a pair, ask one question, print the answer and where its time went, stop.

The pair listens on unix sockets in a directory that is removed at the end, so that it meets no other.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile

from decode_service.config import DecodeConfig
from kvspan.commands.command import Command
from kvspan.commands.flags import add_flags, parse_flag
from kvspan.commands.services import add_log_flags
from kvspan.commands.timings import timings_line
from kvspan.commands.up import PairReady, make_plan, run_pair
from kvspan.commands.values import positive
from prefill_service.config import PrefillConfig


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", metavar="QUESTION", help="what the model is asked")
    add_flags(parser, DecodeConfig, PrefillConfig, without=("prefill", "listen"), defaults={"model": "demo"})
    add_log_flags(parser, default="warning")
    parser.add_argument(
        "--ready-timeout-s",
        default="600",
        metavar="SECONDS",
        help="how long fetching, loading and the first session may take (default: 600)",
    )


def _run(arguments: argparse.Namespace) -> int:
    ready_timeout_s = parse_flag("--ready-timeout-s", positive, arguments.ready_timeout_s)
    with tempfile.TemporaryDirectory(prefix="kvspan-") as folder:
        arguments.listen = f"unix:{folder}/decode.sock"
        plan = make_plan(arguments, f"unix:{folder}/prefill.sock")
        _note("starting a prefill and a decode service ...")
        return asyncio.run(run_pair(plan, ready_timeout_s, lambda ready: _ask(ready, arguments.question)))


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
    print(f"kvspan: {text}", file=sys.stderr, flush=True)


DEMO = Command("demo", "start a pair, ask it one question, and stop", _add_arguments, _run)
