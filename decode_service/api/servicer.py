"""The gRPC face of the decode service: requests in, tokens out, and what an operator asks.

Theory of operation: a request that takes long to read is read on another thread, because pings to prefill
services go out from this event loop: while it stands still for one client, the requests of all wait, and in
the end their sessions are lost. A few are read at a time. The time limit runs meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from common.errors import DeadlineExceeded, ShuttingDown
from common.runtime.clock import Clock
from common.runtime.tasks import SideWork, listed
from common.telemetry.logging import request_of_call
from common.telemetry.timeline import Timeline
from decode_service.api.responses import last_response, token_response
from decode_service.api.status import Reporter
from decode_service.api.validation import RequestReader
from decode_service.core import DecodeCore
from decode_service.generate.answer import TokenEvent
from decode_service.request import Request
from kvspan.v1 import decode_pb2 as pb
from kvspan.v1 import decode_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MAX_LONG_READS = 2
"""Long requests that are read at the same time; each takes a core while it is tokenized."""


@dataclass(slots=True)
class _Answer:
    """What was sent so far."""

    timeline: Timeline
    request: Request | None = None
    """Set once it was read, before any token of it."""

    num_tokens: int = 0


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves clients."""

    def __init__(self, core: DecodeCore, reader: RequestReader, reporter: Reporter, clock: Clock) -> None:
        self._core = core
        self._reader = reader
        self._reporter = reporter
        self._clock = clock
        self._long_reads, self._short_reads = SideWork(MAX_LONG_READS), SideWork(1)
        self._calls: set[asyncio.Task[Any]] = set()
        # Invariant: the tasks of running Generate calls.
        self._is_cut = False

    def cut(self) -> None:
        """End every running call with UNAVAILABLE; the grace is over."""
        self._is_cut = True
        for call in self._calls:
            call.cancel()

    async def Generate(  # noqa: N802 - name given by the contract
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Stream one completion; the last message carries reason, usage and timings."""
        timeline = Timeline(self._clock.now_ns())
        limit_s = self._reader.time_limit_s(context.time_remaining())
        try:
            with listed(self._calls):
                async with asyncio.timeout(limit_s):
                    await self._answer(request, limit_s, timeline, context)
        except TimeoutError as error:
            raise DeadlineExceeded(limit_s) from error
        except asyncio.CancelledError as error:
            if self._is_cut:
                raise ShuttingDown("the decode service is shutting down") from error
            raise

    async def _answer(
        self, asked: pb.GenerateRequest, limit_s: float, timeline: Timeline, context: Context
    ) -> None:
        answer = _Answer(timeline)

        async def read() -> Request:
            answer.request = await self._read(asked, limit_s)
            return answer.request

        async with aclosing(self._core.generate(read, timeline)) as lists:
            async for events in lists:
                await self._send(answer, events, context)

    async def _read(self, asked: pb.GenerateRequest, limit_s: float) -> Request:
        """Validate a request, beside the event loop when that may take long."""
        read = partial(self._reader.read, asked, limit_s)
        if self._reader.is_long(asked):
            request = await self._long_reads.run(read)
        else:
            request = await self._short_reads.run(read) if self._reader.is_slow(asked) else read()
        request_of_call.set(request.request_id)
        return request

    async def GetCapabilities(  # noqa: N802
        self, request: pb.DecodeServiceGetCapabilitiesRequest, context: Context
    ) -> pb.DecodeServiceGetCapabilitiesResponse:
        """Tell what this service is and can."""
        return self._reporter.capabilities()

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """Tell what this service is doing now."""
        return self._reporter.status()

    async def _send(self, answer: _Answer, events: Iterable[TokenEvent], context: Context) -> None:
        """Write one message for tokens that came together."""
        request, tokens = answer.request, tuple(events)
        assert request is not None
        response = token_response(tokens, with_logprobs=request.sampling.logprobs is not None)
        if not answer.num_tokens:
            response.request_id = request.request_id
        answer.num_tokens += len(tokens)
        if tokens[-1].finish is not None:
            last_response(response, tokens[-1].finish, request, answer.num_tokens, answer.timeline)
        await context.write(response)
