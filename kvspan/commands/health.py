"""The command `health`, and how others wait until a service is healthy (grpc.health.v1)."""

from __future__ import annotations

import click

from common.settings import SECONDS, TARGET
from kvspan.commands.command import EXIT_FAILED, EXIT_OK
from kvspan.commands.remote import told_failures

DECODE_SERVICE = "kvspan.v1.DecodeService"
"""Healthy while the decode service can take prompts by the routes it was told to use."""


async def wait_serving(target: str, service: str) -> None:
    """Return when `service` at `target` is healthy, however long that takes; told by the service, not polled.

    Raises `RemoteFailure` when nobody serves there, or the service goes away instead.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

    from common.wire.channel import make_channel
    from common.wire.failure import remote_failure

    async with make_channel(target) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        try:
            async for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as error:
            raise remote_failure(error) from error


def check_health(target: str, service: str, timeout_s: float) -> str:
    """Return the name of the health status of `service` at `target`.

    Raises `RemoteFailure` when there is no answer in time or the service is not known there.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from common.wire.channel import make_sync_channel
    from common.wire.failure import remote_failure

    request = health_pb2.HealthCheckRequest(service=service)
    with make_sync_channel(target) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise remote_failure(error) from error
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


@click.command("health")
@click.argument("target", type=TARGET)
@click.option(
    "--service", default="", metavar="NAME", help="full name of one service of the process (default: all)"
)
@click.option(
    "--timeout-s", type=SECONDS, default=3, metavar="SECONDS", show_default=True, help="how long to wait"
)
def health(target: str, service: str, timeout_s: float) -> int:
    """Tell whether a service is healthy; the exit code says the same.

    TARGET is HOST:PORT or unix:PATH of a service.
    """
    with told_failures():
        status = check_health(target, service, timeout_s)
    print(status)
    return EXIT_OK if status == "SERVING" else EXIT_FAILED
