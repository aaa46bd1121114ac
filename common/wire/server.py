"""A grpc server as both services run it: options, health, reflection, error statuses, one place to bind.

Theory of operation: a server is built, its servicers are added to `server.grpc`, it listens on one or more
addresses and starts. Health is NOT_SERVING until `mark_serving`, and for good after `shut_down`, which lets
running calls go on; `stop` waits for them and then cuts. Reflection answers under its v1alpha name and
under v1, whose messages are the same on the wire. How many connections a server takes, and when idle ones
end, follows from the descriptors that are left (`common/runtime/descriptors.py`).

Ownership: belongs to the event loop it was made on; whoever makes it stops it, or uses it as an async
context manager, which stops it without waiting.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import (  # type: ignore[import-untyped]
    reflection,
    reflection_pb2,
    reflection_pb2_grpc,
)

from common.errors import ConfigError
from common.runtime.address import TCPAddress, UnixAddress, parse_address
from common.runtime.descriptors import (
    ScarcityWatch,
    connection_limit,
    descriptor_limit,
    idle_limit_s,
    num_left,
)
from common.runtime.listening import check_free, free_addresses
from common.telemetry.logging import log_fields
from common.wire.call_limits import CallLimits
from common.wire.interceptor import CallInterceptor, CallStatistics, OnInvariant
from common.wire.library_log import quiet_meetings

logger = logging.getLogger(__name__)

MAX_STREAMS = 1024
"""Calls of one connection; a client keeps the next one until another has ended."""

MAX_PENDING_CALLS = 100_000
"""Calls that have arrived and whose handler was not looked for; they wait for a turn of the loop."""

MAX_CONNECTIONS = 1 << 20
"""However many descriptors there are."""

HANDSHAKE_MS = 10_000
"""How long a new connection may take to say that it speaks HTTP/2."""

LOOK_S = 0.5
"""Seconds between two looks at the descriptors that are left."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    # A second server on the same port must fail, not share its connections.
    ("grpc.so_reuseport", 0),
    # Clients may ping idle sessions; the defaults would end a session with "too many pings".
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Above these numbers the library ends calls of its own choice, other clients' too, with CANCELLED. To
    # refuse is our part (`call_limits.py`), and one connection has streams enough to be told of it.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
)

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
"""Name that newer clients ask for; its messages are those of v1alpha."""

SOCKET_UMASK = 0o177
"""A unix socket is for its owner alone: whoever may connect may use the service."""

LISTEN = "listen"
"""Name of the setting that errors blame."""


class Server:
    """A grpc.aio server with health, reflection and error statuses."""

    def __init__(
        self,
        services: Sequence[str],
        *,
        limits: Mapping[str, int] | None = None,
        on_invariant: OnInvariant | None = None,
    ) -> None:
        """Serve the services with these full names; `limits` are those of `CallLimits`."""
        quiet_meetings()
        self._calls = CallInterceptor(CallLimits(limits), on_invariant)
        options = (*SERVER_OPTIONS, *connection_options(num_left()))
        self.grpc: grpc.aio.Server = grpc.aio.server(interceptors=[self._calls], options=options)
        """Where servicers are added."""

        self._services = tuple(services)
        self._socket_paths: list[Path] = []
        self._watch: asyncio.Task[None] | None = None
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        _add_reflection(self._services, self.grpc)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(0.0)

    def listen(self, address: str) -> str:
        """Bind all that `address` (`host:port` or `unix:PATH`) stands for; return it with the port.

        Called before `start`, once per address.

        Raises: `ConfigError` that says why it cannot be bound; the server is of no use then.
        """
        parsed = parse_address(LISTEN, address)
        return self._listen_unix(parsed) if isinstance(parsed, UnixAddress) else self._listen_tcp(parsed)

    def statistics(self) -> CallStatistics:
        """Return how many calls were refused or broke, since start."""
        return self._calls.statistics()

    async def start(self) -> None:
        """Take calls on every bound address; health says NOT_SERVING until `mark_serving`."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.grpc.start()
        self._watch = asyncio.create_task(_watch_descriptors(), name="descriptors")

    async def mark_serving(self, *parts: str) -> None:
        """Tell clients and supervisors that the service works, or these parts of it."""
        await self._set_health(health_pb2.HealthCheckResponse.SERVING, *parts)

    async def mark_not_serving(self, *parts: str) -> None:
        """Tell clients and supervisors that calls would fail for now, or calls of these parts."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING, *parts)

    async def shut_down(self) -> None:
        """Say NOT_SERVING for good while calls are still taken."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, let running ones end within `grace_s`, then cut them. Idempotent."""
        await self.shut_down()
        await self.grpc.stop(grace_s)
        if self._watch is not None:
            self._watch.cancel()

    def remove_sockets(self) -> None:
        """Remove the socket files at once, for a process that is about to end without stopping."""
        for path in self._socket_paths:
            path.unlink(missing_ok=True)

    def _listen_tcp(self, address: TCPAddress) -> str:
        port = address.port
        for one in free_addresses(LISTEN, address):
            try:
                port = self.grpc.add_insecure_port(one.uri)
            except RuntimeError as error:
                problem = f"cannot listen on {one}: taken while this service started"
                raise ConfigError(LISTEN, address, problem) from error
        bound = TCPAddress(address.host, port)
        if os.geteuid() == 0:
            logger.warning("listen.as_root", extra=log_fields(address=bound))
        return str(bound)

    def _listen_unix(self, address: UnixAddress) -> str:
        check_free(LISTEN, address)
        try:
            with _umask(SOCKET_UMASK):
                self.grpc.add_insecure_port(address.uri)
        except RuntimeError as error:
            raise ConfigError(LISTEN, address, f"cannot listen: {error}") from error
        self._socket_paths.append(address.path)
        return str(address)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus, *parts: str) -> None:
        for name in parts or ("", *self._services):
            await self._health.set(name, status)


def connection_options(left: int) -> tuple[tuple[str, int], ...]:
    """Return how many connections to take, and when to end idle ones, with so many descriptors left.

    A connection with an open call, as a session is, counts as idle never; one that was not greeted does.
    """
    connections = connection_limit(left)
    idle_ms = round(idle_limit_s(connections) * 1000)
    return (
        ("grpc.max_allowed_incoming_connections", min(connections, MAX_CONNECTIONS)),
        ("grpc.max_connection_idle_ms", idle_ms),
        ("grpc.server_handshake_timeout_ms", min(idle_ms, HANDSHAKE_MS)),
    )


async def _watch_descriptors() -> None:
    """Log when few descriptors are left: clients are about to be refused without a status."""
    watch = ScarcityWatch()
    while True:
        left = num_left()
        if watch.is_due(left):
            logger.warning("descriptors.scarce", extra=log_fields(left=left, limit=descriptor_limit()))
        await asyncio.sleep(LOOK_S)


def _add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    # Not the name of v1: it has no descriptor, and who lists services goes on to describe each.
    servicer = reflection.aio.ReflectionServicer((*services, health.SERVICE_NAME, reflection.SERVICE_NAME))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    v1 = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": v1}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION_V1, handlers),))


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    """Make new files with `mask` on; the mask is of the process, so nothing may await in between."""
    previous = os.umask(mask)
    try:
        yield
    finally:
        os.umask(previous)
