"""The life of a call: counted, read within a limit, answered, and ended with a status whatever happened.

Theory of operation: every asyncio handler is wrapped as one of a stream of requests, because grpc reads the
one request of any other kind before it calls the handler. So a call is counted first (`call_limits.py`), and
only one that may be open is read, within READ_LIMIT_S, unless it has to make room before. What its handler
raises ends it:

    KVSpanError, RemoteFailure    its own status (`status.py`)
    bytes that are no message     the same (`decoding.py`)
    InvariantViolation            INTERNAL, and the service is told, which has to stop
    CancelledError                passes when the call itself was cancelled; else some inner task was, which
                                  grpc would not tell the client: INTERNAL
    a failed read or write        the call has ended already; its handler ends as if cancelled
    anything else                 INTERNAL without its text, logged with a traceback and counted; so does a
                                  panic of native code, which is no `Exception`

A generator is driven here rather than by grpc: when a client cancels while a message is on its way, grpc
would leave the generator suspended until it is collected, with all it holds.

Ownership: nothing of a request outlives its call. An exception holds the frames that it passed, a future in
one of these holds the exception, and the collector is slow to find such a circle: so tracebacks are dropped.

Handlers of other libraries that run on threads are left as they are.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc

from common.errors import (
    CallsExhausted,
    DeadlineExceeded,
    InvalidRequest,
    InvariantViolation,
    KVSpanError,
    Violation,
)
from common.runtime.tracebacks import drop_tracebacks
from common.telemetry.logging import log_fields, request_of_call
from common.wire import decoding
from common.wire.call_limits import CallLimits, OpenCall
from common.wire.failure import RemoteFailure
from common.wire.status import code_of, set_status

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
OnInvariant = Callable[[InvariantViolation], None]

_first_read: ContextVar[Callable[[Context], Awaitable[object]]] = ContextVar("first_read")
"""How the handler of a stream reads its first request; set for each call."""

READ_LIMIT_S = 10.0
"""Seconds in which a client has to send a request, or the next one of a stream without a limit of its own."""


@dataclass(frozen=True, slots=True)
class CallStatistics:
    """Calls of all methods since start."""

    num_exhausted: int
    """Refused because too many of their method were open."""

    num_broken: int
    """Ended with an exception that nobody meant."""


@dataclass(frozen=True, slots=True)
class _Method:
    """A handler as it was registered."""

    name: str
    handler: MethodHandler
    behavior: Callable[..., Any]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps handlers so that their calls are bounded, and end with the status of what they raise."""

    def __init__(self, limits: CallLimits, on_invariant: OnInvariant | None = None) -> None:
        self._limits = limits
        self._on_invariant = on_invariant
        self._num_broken = 0

    def statistics(self) -> CallStatistics:
        """Return the counts now."""
        return CallStatistics(self._limits.num_exhausted, self._num_broken)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        """Return the handler of a call, wrapped."""
        handler = await continuation(handler_call_details)
        behavior = None if handler is None else _behavior(handler)
        if handler is None or behavior is None:
            return handler
        method = _Method(handler_call_details.method, handler, behavior)

        async def wrapped(requests: AsyncIterator[Any], context: Context) -> None:
            await self._run(method, requests, context)

        return grpc.stream_stream_rpc_method_handler(wrapped, _parser(handler), handler.response_serializer)

    async def _run(self, method: _Method, requests: AsyncIterator[Any], context: Context) -> None:
        """Answer a call and end it; this frame may be held by exceptions, so it holds no request."""
        try:
            with self._limits.open(method.name) as call:
                await self._answer(method, call, requests, context)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            # grpc compares an `AbortError`, which handlers of other libraries raise, with its own.
            passes = _was_cancelled(error) or isinstance(error, grpc.aio.AbortError)
            has_ended = _has_ended(error)
            if not passes and not has_ended:
                self._log(method.name, error)
                set_status(context, error)
            drop_tracebacks(error)
            if isinstance(error, InvariantViolation) and self._on_invariant is not None:
                self._on_invariant(error)
            if passes:
                raise
            if has_ended:
                raise asyncio.CancelledError("the call ended while a message was on its way") from None

    async def _answer(
        self, method: _Method, call: OpenCall, requests: AsyncIterator[Any], context: Context
    ) -> None:
        """Read what the client asks and write what the handler answers."""
        handler, behavior = method.handler, method.behavior
        _first_read.set(partial(self._read, call))
        asked = _limited(requests) if handler.request_streaming else await self._read(call, context)
        if not handler.response_streaming:
            await context.write(await behavior(asked, context))
            return
        await _begin(context)
        if inspect.iscoroutinefunction(behavior):
            await behavior(asked, context)
            return
        async with aclosing(behavior(asked, context)) as responses:
            async for response in responses:
                await context.write(response)

    async def _read(self, call: OpenCall, context: Context) -> object:
        """Return the one request of a call.

        Raises: `DeadlineExceeded` when it is not sent in time, `CallsExhausted` when the call has to make
        room before, `InvalidRequest` when there is none.
        """
        try:
            async with asyncio.timeout(READ_LIMIT_S) as limit:
                with self._limits.silence(call, partial(_end_now, limit)):
                    request = await context.read()
        except TimeoutError:
            if call.has_made_room:
                raise self._limits.refusal(call.method) from None
            raise DeadlineExceeded(READ_LIMIT_S, "no request was sent") from None
        if request is grpc.aio.EOF:
            raise InvalidRequest([Violation("request", "the call has none")])
        if isinstance(request, decoding.Undecodable):
            raise request.error
        return request

    def _log(self, method: str, error: BaseException) -> None:
        """Log how a call ended, as loud as it deserves."""
        about = {"method": method}
        if request_id := request_of_call.get():
            about["request_id"] = request_id
        match error:
            case CallsExhausted():
                if self._limits.num_refused(method) == 1:
                    logger.warning("calls.exhausted", extra=log_fields(method=method, error=error))
            case KVSpanError() | RemoteFailure():
                fields = log_fields(**about, code=code_of(error).name, error=str(error))
                logger.info("call.failed", extra=fields)
            case InvariantViolation():
                logger.critical("invariant.violated", extra=log_fields(**about), exc_info=error)
            case _:
                self._num_broken += 1
                fields = log_fields(**about, broken_calls=self._num_broken)
                logger.error("call.broken", extra=fields, exc_info=error)


async def read_first(context: Context) -> Any:
    """Read the first request of a stream whose handler reads the context; until then the call is silent.

    Raises: as for the one request of other calls.
    """
    return await _first_read.get()(context)


def _end_now(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(0)


async def _limited(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield the requests of a stream that is iterated; one that reads its context sets limits of its own."""
    while True:
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                request = await anext(requests, grpc.aio.EOF)
        except TimeoutError:
            raise DeadlineExceeded(READ_LIMIT_S, "no further request was sent") from None
        if request is grpc.aio.EOF:
            return
        yield request


async def _begin(context: Context) -> None:
    """Send the headers by themselves.

    They would else go with the first message, and be forgotten by grpc when that write is cancelled: a status
    would then be sent with headers a second time, which fails, and the client would wait for ever.
    """
    await context.send_initial_metadata(())


def _behavior(handler: MethodHandler) -> Callable[..., Any] | None:
    """Return the function of a handler if it runs on the event loop."""
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    behavior = next((kind for kind in kinds if kind is not None), None)
    is_ours = inspect.iscoroutinefunction(behavior) or inspect.isasyncgenfunction(behavior)
    return behavior if is_ours else None


def _parser(handler: MethodHandler) -> decoding.Deserializer | None:
    guard = decoding.of_stream if handler.request_streaming else decoding.of_request
    return guard(handler.request_deserializer)


def _has_ended(error: BaseException) -> bool:
    """Tell whether a read or write failed because the call, or its server, is over."""
    is_of_library = isinstance(error, grpc.aio.BaseError)
    return is_of_library and not isinstance(error, grpc.aio.UsageError | grpc.aio.AbortError)


def _was_cancelled(error: BaseException) -> bool:
    """Tell whether the client or the server ended the call, rather than something inside the handler."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
