"""Calls to services: whether they are healthy, and how a status that is not OK reads on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from decode_service.config import SERVICE_NAME
from kvspan.commands.command import CommandFailed

if TYPE_CHECKING:
    from common.wire.failure import RemoteFailure

PREFILL_SERVICE = "kvspan.v1.PrefillService"


async def wait_serving(target: str, service: str) -> None:
    """Return when `service` at `target` is healthy, however long that takes; told by the service, not polled.

    Raises `RemoteFailure` when nobody serves there, or the service goes away instead.
    """
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

    from common.wire.channel import make_channel
    from common.wire.failure import remote_failures

    async with make_channel(target) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        with remote_failures():
            async for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return


async def longest_step_s(target: str) -> float:
    """Return for how long the engine of the prefill service at `target` cannot be stopped, by what it says.

    Raises `RemoteFailure` when it does not answer.
    """
    from common.session.messages import step_limit_s
    from common.wire.channel import make_channel
    from common.wire.failure import remote_failures
    from kvspan.v1.transfer_pb2 import PrefillServiceGetCapabilitiesRequest
    from kvspan.v1.transfer_pb2_grpc import PrefillServiceStub

    async with make_channel(target) as channel:
        with remote_failures():
            request = PrefillServiceGetCapabilitiesRequest()
            answer = await PrefillServiceStub(channel).GetCapabilities(request)
    return step_limit_s(answer.longest_step_ms)


def check_health(target: str, service: str, timeout_s: float) -> str:
    """Return the name of the health status of `service` at `target`.

    Raises `RemoteFailure` when there is no answer in time or the service is not known there.
    """
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from common.wire.channel import make_sync_channel
    from common.wire.failure import remote_failures

    request = health_pb2.HealthCheckRequest(service=service)
    with make_sync_channel(target) as channel, remote_failures():
        response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def call_prefill(target: str, call: Callable[[Any], Any]) -> Any:
    """Return what a call of the stub of the prefill service at `target` answers. Raises: `RemoteFailure`."""
    from common.wire.channel import make_sync_channel
    from common.wire.failure import remote_failures
    from kvspan.v1.transfer_pb2_grpc import PrefillServiceStub

    with make_sync_channel(target) as channel, remote_failures():
        return call(PrefillServiceStub(channel))


NOBODY = ("failed to connect", "errors resolving", "DNS resolution failed")
"""How the library begins when it reached no server."""

WHO_TIME_LIMIT_S = 3.0
"""Of the question which service answers at an address."""


@contextmanager
def told_failures(target: str | None = None) -> Iterator[None]:
    """Turn a call that did not end with OK into CommandFailed: code, reason, message, and what to do.

    `target` is the address that was asked, where whoever typed it can be wrong about it.
    """
    from common.wire.failure import RemoteFailure

    try:
        yield
    except RemoteFailure as failure:
        after_s, request_id = failure.retry_after_s, failure.metadata.get("request_id")
        hint = f" (request {request_id})" if request_id else ""
        hint += "" if after_s is None else f" (try again in {after_s:g} s)"
        advice = "" if target is None else _advice(target, failure)
        raise CommandFailed(f"{advice}{failure}{hint}") from failure


def _advice(target: str, failure: RemoteFailure) -> str:
    """Return what is wrong with an address, as far as the library's status shows it; else nothing."""
    if failure.reason:
        return ""
    if failure.code.name == "UNAVAILABLE" and failure.message.startswith(NOBODY):
        return f"nobody answers at {target}; start a pair with kvspan up, or name another address: "
    if failure.code.name == "UNIMPLEMENTED" and (found := _service_at(target)) is not None:
        return f"{target} is a {found} service, which has no such call; name the other one: "
    return ""


def _service_at(target: str) -> str | None:
    """Return which service answers at `target`; None when it does not say."""
    from common.wire.failure import RemoteFailure

    for name, service in (("prefill", PREFILL_SERVICE), ("decode", SERVICE_NAME)):
        try:
            check_health(target, service, WHO_TIME_LIMIT_S)
        except RemoteFailure:
            continue
        return name
    return None
