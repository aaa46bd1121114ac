"""Everything a client can do wrong to the decode service, one thing at a time.

A call is made of raw bytes, so that no library stands between; each must end with a status that is not OK and
says why, and must cost the service nothing.

Not here: strangers of the prefill service (`impostors.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from common.wire.channel import make_channel
from common.wire.failure import remote_failure
from kvspan.v1 import decode_pb2
from tests.faults.calls import Outcome

GENERATE = "/kvspan.v1.DecodeService/Generate"
ANSWER_LIMIT_S = 30.0
AT_ONCE = 50


def ask(**fields: Any) -> bytes:
    """Return a request for some tokens, with fields of its sampling or its own changed."""
    own = {name: fields.pop(name) for name in ("route", "transfer", "request_id", "model") if name in fields}
    tokens = fields.pop("tokens", [65, 66, 67])
    sampling = {"max_new_tokens": 2, **fields}
    return decode_pb2.GenerateRequest(
        tokens=decode_pb2.TokenPrompt(token_ids=tokens), sampling=sampling, **own
    ).SerializeToString()


INVALID_UTF8 = ask() + b"\x22\x04\x42\x02\xff\xfe"
"""A request whose second `sampling` field has a stop string that is no UTF-8."""

INVALID = "INVALID_ARGUMENT REQUEST_FIELD_INVALID"
NEVER = "OUT_OF_RANGE REQUEST_CAN_NEVER_FIT"

REQUESTS: dict[str, tuple[bytes, str]] = {
    "no prompt": (b"", INVALID),
    "no token": (ask(tokens=[]), INVALID),
    "token beyond the vocabulary": (ask(tokens=[1 << 31]), INVALID),
    "prompt beyond the context": (ask(tokens=[65] * 1100), NEVER),
    "message beyond four megabytes": (ask(tokens=[200] * (3 << 20)), "RESOURCE_EXHAUSTED"),
    "answer beyond any size": (ask(max_new_tokens=(1 << 32) - 1), NEVER),
    "answer of no token": (ask(max_new_tokens=0), INVALID),
    "temperature not a number": (ask(temperature=float("nan")), INVALID),
    "temperature below zero": (ask(temperature=-1.0), INVALID),
    "top_p without bound": (ask(top_p=float("inf")), INVALID),
    "penalty of zero": (ask(repetition_penalty=0.0), INVALID),
    "logprobs beyond the vocabulary": (ask(logprobs=1 << 31), INVALID),
    "many completions": (ask(n=5000), INVALID),
    "unknown route": (ask(route=99), INVALID),
    "unknown mode": (ask(transfer=77), INVALID),
    "long stop strings": (ask(stop=["x" * 9999] * 99), INVALID),
    "long name": (ask(request_id="x" * 99999), INVALID),
    "other model": (ask(model="other"), "NOT_FOUND UNKNOWN_MODEL"),
    "stop that is no UTF-8": (INVALID_UTF8, INVALID),
    "bytes without meaning": (b"\xff" * 64, INVALID),
}
"""What a client sends -> how the call must end."""


async def call(target: str, message: bytes) -> Outcome:
    """Ask for tokens with raw bytes and return how that ended."""
    channel = make_channel(target)
    try:
        async for _ in _generate(channel)(message, timeout=ANSWER_LIMIT_S):
            pass
    except grpc.aio.AioRpcError as error:
        failure = remote_failure(error)
        return Outcome(failure.code.name, failure.reason, failure.message)
    finally:
        await channel.close()
    return Outcome("OK")


async def cancelled_calls(target: str, count: int) -> None:
    """Make calls and give each up at once, or after its first answer, some at a time."""
    channel = make_channel(target)
    message = ask(max_new_tokens=8)
    try:
        for _ in range(0, count, AT_ONCE):
            calls = [_generate(channel)(message) for _ in range(AT_ONCE)]
            for number, one in enumerate(calls):
                if number % 10 == 0:
                    await one.initial_metadata()
                one.cancel()
    finally:
        await channel.close()


@asynccontextmanager
async def silent_calls(target: str, count: int) -> AsyncIterator[None]:
    """Keep calls open that send nothing, as many as the service lets be."""
    channel = make_channel(target)
    open_call: Any = channel.stream_stream(GENERATE)
    calls = [open_call() for _ in range(count)]
    try:
        await asyncio.gather(*(call.wait_for_connection() for call in calls), return_exceptions=True)
        yield
    finally:
        for one in calls:
            one.cancel()
        await channel.close()


def _generate(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(GENERATE)
