"""Every error of a handler becomes a status with details: the one place where calls fail.

Theory of operation: the interceptor wraps each asyncio handler. What a handler raises ends its call:

    KVSpanError, RemoteFailure    its own status (`status.py`)
    bytes that are no message     the same (`decoding.py`)
    InvariantViolation            INTERNAL, and the service is told, which has to stop
    CancelledError                passes when the call itself was cancelled; else some inner task was, which
                                  grpc would not tell the client: INTERNAL
    a failed read or write        the call has ended already; its handler ends as if cancelled
    anything else                 INTERNAL without its text, logged with a traceback

A generator is driven here rather than by grpc: when a client cancels while a message is on its way, grpc
would leave the generator suspended until it is collected, with all it holds.

Handlers of other libraries that run on threads are left as they are.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc

from common.errors import InvariantViolation, KVSpanError
from common.telemetry.logging import log_fields
from common.wire import decoding
from common.wire.failure import RemoteFailure
from common.wire.status import abort, code_of

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
OnInvariant = Callable[[InvariantViolation], None]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps handlers so that what they raise ends their call with its status."""

    def __init__(self, on_invariant: OnInvariant | None = None) -> None:
        self._on_invariant = on_invariant

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        """Return the handler of a call, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        if handler.response_streaming:
            return self._wrap_stream(handler, handler_call_details.method)
        return self._wrap_unary(handler, handler_call_details.method)

    def _wrap_unary(self, handler: MethodHandler, method: str) -> MethodHandler:
        behavior = handler.stream_unary if handler.request_streaming else handler.unary_unary
        if not inspect.iscoroutinefunction(behavior):
            return handler

        async def wrapped(request: object, context: Context) -> object:
            async with self._failing(context, method):
                return await behavior(_decoded(request), context)

        make = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(wrapped, _parser(handler), handler.response_serializer)

    def _wrap_stream(self, handler: MethodHandler, method: str) -> MethodHandler:
        behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
        if inspect.isasyncgenfunction(behavior):
            wrapped = self._wrap_generator(behavior, method)
        elif inspect.iscoroutinefunction(behavior):
            wrapped = self._wrap_writer(behavior, method)
        else:
            return handler
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_stream_rpc_method_handler
        )
        return make(wrapped, _parser(handler), handler.response_serializer)

    def _wrap_generator(self, behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
        def answer(request: object, context: Context) -> Any:
            return behavior(_decoded(request), context)

        async def wrapped(request: object, context: Context) -> None:
            async with self._failing(context, method), aclosing(answer(request, context)) as responses:
                await _begin(context)
                async for response in responses:
                    await context.write(response)

        return wrapped

    def _wrap_writer(self, behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
        async def wrapped(request: object, context: Context) -> None:
            async with self._failing(context, method):
                await _begin(context)
                await behavior(_decoded(request), context)

        return wrapped

    @asynccontextmanager
    async def _failing(self, context: Context, method: str) -> AsyncIterator[None]:
        """End the call with the status of what the body raises."""
        try:
            yield
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError as error:
            raise asyncio.CancelledError("the call ended while a message was on its way") from error
        except (KVSpanError, RemoteFailure) as error:
            logger.info("call.failed", extra=log_fields(method=method, code=code_of(error).name, error=error))
            await abort(context, error)
        except InvariantViolation as error:
            logger.critical("invariant.violated", extra=log_fields(method=method), exc_info=True)
            if self._on_invariant is not None:
                self._on_invariant(error)
            await abort(context, error)
        except asyncio.CancelledError as error:
            if _call_was_cancelled(context):
                raise
            logger.exception("call.broken", extra=log_fields(method=method))
            await abort(context, error)
        except Exception as error:
            logger.exception("call.broken", extra=log_fields(method=method))
            await abort(context, error)


async def _begin(context: Context) -> None:
    """Send the headers by themselves.

    They would else go with the first message, and be forgotten by grpc when that write is cancelled: a status
    would then be sent with headers a second time, which fails, and the client would wait for ever.
    """
    await context.send_initial_metadata(())


def _parser(handler: MethodHandler) -> decoding.Deserializer | None:
    guard = decoding.of_stream if handler.request_streaming else decoding.of_request
    return guard(handler.request_deserializer)


def _decoded(request: object) -> object:
    """Return the request, or the iterator of them; raises what kept it from being parsed."""
    if isinstance(request, decoding.Undecodable):
        raise request.error
    return request


def _call_was_cancelled(context: Context) -> bool:
    """Tell whether the client or the server ended the call, rather than something inside the handler."""
    task = asyncio.current_task()
    return context.cancelled() or (task is not None and task.cancelling() > 0)
