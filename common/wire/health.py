"""Whether a service says that it works, by the standard health protocol."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from common.wire.failure import remote_failure

SERVING = health_pb2.HealthCheckResponse.SERVING


async def is_serving(channel: grpc.aio.Channel, service: str = "", *, time_limit_s: float = 5.0) -> bool:
    """Ask once. `service` is a full name, or empty for the process.

    Raises: `RemoteFailure` when nobody answers or the service is not known there.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=time_limit_s)
    except grpc.RpcError as error:
        raise remote_failure(error) from error
    return bool(answer.status == SERVING)


async def wait_until_serving(channel: grpc.aio.Channel, service: str = "", *, time_limit_s: float) -> None:
    """Return when the service says that it works, also one that is not up yet.

    Raises: `RemoteFailure` when it does not within `time_limit_s`.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    watch = stub.Watch(request, timeout=time_limit_s, wait_for_ready=True)
    try:
        async for answer in watch:
            if answer.status == SERVING:
                return
    except grpc.RpcError as error:
        raise remote_failure(error) from error
    finally:
        watch.cancel()
