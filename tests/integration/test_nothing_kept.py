"""Nothing of a request outlives its call, however that ends: not even until the collector runs (row Y30)."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.errors import InvariantViolation
from common.model.forward.prefill import ChunkedPrefill
from common.wire.channel import make_channel
from common.wire.failure import remote_failure
from decode_service.api import servicer
from decode_service.prefill import importer
from decode_service.request import Request
from kvspan.v1 import decode_pb2 as pb
from tests.integration.conftest import Configs, LoadPair, shared_pair
from tests.integration.test_publication import digest_after, wrong_digest
from tests.support.cases import prompt_of
from tests.support.gates import Gate, lying, with_engine
from tests.support.pair import Pair, make_configs, running_pair, wait_until

PROMPT, BROKEN = prompt_of(200), prompt_of(77)


class Panic(BaseException):
    """As native code raises it: no `Exception`."""


def on_fire(inner: Any) -> Callable[..., Any]:
    """Return an engine that raises an error of its own for each prompt as long as BROKEN."""

    def prefill(tokens: Any, *rest: Any) -> Any:
        if len(tokens) == len(BROKEN):
            raise RuntimeError("on fire")
        return inner.prefill(tokens, *rest)

    return prefill


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, str], load: LoadPair
) -> AsyncIterator[Pair]:
    """Return a running DENSE pair whose prefill engine may break."""
    configs = make_configs(tmp_path_factory.mktemp("pair"), checkpoints["DENSE"], lanes=2, queue_limit=3)
    async with shared_pair(*configs, with_engine(load(*configs), on_fire)) as pair:
        yield pair


@asynccontextmanager
async def nothing_kept() -> AsyncIterator[None]:
    """Fail when a request that was made inside is still there at the end, with the collector off.

    Without logs too: pytest keeps their records. A thread may let go a moment after the call has ended.
    """
    gc.collect()
    gc.disable()
    logging.disable()
    try:
        yield
        await wait_until(
            lambda: not any(type(one) in (Request, pb.GenerateRequest) for one in gc.get_objects())
        )
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


Fail = Callable[[Pair, pytest.MonkeyPatch], Awaitable[str]]


def tokens(prompt: list[int], **fields: Any) -> dict[str, Any]:
    """Return the fields of a request."""
    return {"tokens": {"token_ids": prompt}, "sampling": {"max_new_tokens": 4, "ignore_eos": True}, **fields}


async def send(pair: Pair, time_limit_s: float | None = None, **fields: Any) -> str:
    """Send a request as bytes, so that no message of this test is mistaken for one of the service."""
    data = pb.GenerateRequest(**fields).SerializeToString()
    return await send_bytes(pair, data, time_limit_s)


async def send_bytes(pair: Pair, data: bytes, time_limit_s: float | None = None) -> str:
    """Return the reason of the status; of one without, its code."""
    async with make_channel(pair.decode_address) as channel:
        ask: Any = channel.unary_stream("/kvspan.v1.DecodeService/Generate")
        try:
            async for _ in ask(data, timeout=time_limit_s):
                pass
        except grpc.RpcError as error:
            failure = remote_failure(error)
            return failure.reason or failure.code.name
    return "OK"


async def invalid(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Ask without a token."""
    return await send(pair, **tokens([]))


async def too_long(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Ask for what never fits."""
    return await send(pair, text="x" * 100_000)


async def unknown_model(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Ask for another model."""
    return await send(pair, **tokens(PROMPT, model="other"))


async def no_message(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Send bytes that are none."""
    return await send_bytes(pair, b"\xff" * 100_000)


async def queue_full(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Ask more than fits at once; those on lanes and in the queue wait for the end of all others."""
    patch.setattr(importer, "digest", digest_after(gate := Gate()))
    asking = [asyncio.create_task(send(pair, **tokens(PROMPT))) for _ in range(12)]
    await wait_until(lambda: sum(one.done() for one in asking) == len(asking) - 5)
    gate.open()
    return " ".join(sorted(set(await asyncio.gather(*asking))))


async def deadline(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Ask for more than the time limit allows."""
    patch.setattr(importer, "digest", digest_after(gate := Gate()))
    try:
        return await send(pair, 0.2, **tokens(PROMPT))
    finally:
        gate.open()


async def cancelled(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Leave while tokens come."""
    sampling = {"max_new_tokens": 800, "ignore_eos": True}
    asking = asyncio.create_task(send(pair, **tokens(PROMPT, sampling=sampling)))
    await wait_until(lambda: pair.decode.admission.statistics().num_decoding == 1)
    return await leave(asking)


async def cancelled_early(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Leave while the prompt is computed."""
    for route in (pb.ROUTE_REMOTE, pb.ROUTE_LOCAL):
        asking = asyncio.create_task(send(pair, **tokens(prompt_of(1000), route=route)))
        await wait_until(lambda: pair.decode.admission.statistics().num_transferring == 1)
        await leave(asking)
    return "left"


async def leave(asking: asyncio.Task[str]) -> str:
    """Cancel a call, and wait until it has ended here."""
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return "left"


async def bad_digest(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Receive bytes that do not match."""
    lying(patch, wrong_digest)
    return await send(pair, **tokens(PROMPT))


async def engine(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Ask for a prompt at which the engine there breaks."""
    return await send(pair, **tokens(BROKEN))


async def local_engine(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Have the engine here break."""

    def prefill(*given: object) -> object:
        raise RuntimeError("on fire")

    patch.setattr(ChunkedPrefill, "prefill", prefill)
    return await send(pair, **tokens(PROMPT, route=pb.ROUTE_LOCAL))


async def panic(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Have a handler break by what is no `Exception`."""

    def response(*given: object, **named: object) -> object:
        raise Panic

    patch.setattr(servicer, "token_response", response)
    return await send(pair, **tokens(PROMPT))


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (invalid, "REQUEST_FIELD_INVALID"),
        (too_long, "REQUEST_CAN_NEVER_FIT"),
        (unknown_model, "UNKNOWN_MODEL"),
        (no_message, "REQUEST_FIELD_INVALID"),
        (queue_full, "OK QUEUE_FULL"),
        (deadline, "DEADLINE_EXCEEDED"),
        (cancelled, "left"),
        (cancelled_early, "left"),
        (bad_digest, "KV_CHECKSUM"),
        (engine, "PREFILL_ENGINE_FAILED"),
        (local_engine, "ENGINE_FAILED"),
        (panic, "INTERNAL_ERROR"),
    ],
)
async def test_y30_a_call_that_failed_keeps_nothing_of_its_request(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, fail: Fail, reason: str
) -> None:
    """Y30: a refused prompt of megabytes must not wait for a collector that is in no hurry."""
    async with nothing_kept():
        with monkeypatch.context() as patch:
            assert await fail(pair, patch) == reason
        await pair.wait_idle()


async def peer_lost(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Lose the prefill service while a prompt is computed."""
    asking = asyncio.create_task(send(pair, **tokens(prompt_of(1000))))
    await wait_until(lambda: pair.decode.admission.statistics().num_transferring == 1)
    await pair.prefill.servicer.end_streams(0.0)
    return await asking


async def shutting_down(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Ask a service that ends."""
    pair.decode.core.shut_down()
    return await send(pair, **tokens(PROMPT))


async def invariant(pair: Pair, patch: pytest.MonkeyPatch) -> str:
    """Have a handler find a bug of ours, which ends the service."""

    def response(*given: object, **named: object) -> object:
        raise InvariantViolation("page 3 has two owners")

    patch.setattr(servicer, "token_response", response)
    return await send(pair, **tokens(PROMPT))


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (peer_lost, "PREFILL_PEER_LOST"),
        (shutting_down, "SHUTTING_DOWN"),
        (invariant, "INVARIANT_VIOLATED"),
    ],
)
async def test_y30_the_end_of_a_service_keeps_nothing_of_a_request(
    dense: Configs, load: LoadPair, monkeypatch: pytest.MonkeyPatch, fail: Fail, reason: str
) -> None:
    """Y30: calls that end with a peer or with the service let go as well."""
    async with running_pair(*dense, load(*dense)) as pair, nothing_kept():
        with monkeypatch.context() as patch:
            assert await fail(pair, patch) == reason
        await pair.wait_idle()
