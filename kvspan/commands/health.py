"""The command `health`: what a service says of itself (grpc.health.v1)."""

from __future__ import annotations

import click

from common.settings import SECONDS, TARGET
from kvspan.commands.command import EXIT_FAILED, EXIT_OK
from kvspan.commands.remote import check_health, told_failures


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
    with told_failures(target):
        status = check_health(target, service, timeout_s)
    print(status)
    return EXIT_OK if status == "SERVING" else EXIT_FAILED
