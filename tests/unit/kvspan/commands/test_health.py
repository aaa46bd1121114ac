"""`kvspan health` and the wait for a healthy service follow grpc.health.v1."""

from __future__ import annotations

import asyncio

import pytest

from common.wire.failure import RemoteFailure
from kvspan import cli
from kvspan.commands.command import EXIT_FAILED, EXIT_OK
from kvspan.commands.remote import wait_serving
from tests.support.wire import DECODE_SERVICE, ScriptedDecode, answer_hello, serving


async def health(address: str, *flags: str) -> int:
    """Run the command against `address` and return its exit code."""
    return await asyncio.to_thread(cli.main, ["health", address, *flags])


async def test_exit_code_tells_whether_the_service_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    """0 means SERVING; anything else is 1; the status is printed."""
    async with serving(ScriptedDecode(answer_hello)) as (server, address):
        await server.mark_serving()
        healthy = await health(address, f"--service={DECODE_SERVICE}")
        await server.mark_not_serving()
        ill = await health(address)

    assert (healthy, ill) == (EXIT_OK, EXIT_FAILED)
    assert capsys.readouterr().out == "SERVING\nNOT_SERVING\n"


async def test_unknown_service_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is not served there is not healthy."""
    async with serving(ScriptedDecode(answer_hello)) as (_, address):
        code = await health(address, "--service=kvspan.v1.NoSuchService")

    assert code == EXIT_FAILED
    assert "NOT_FOUND" in capsys.readouterr().err


async def test_wait_ends_when_the_service_becomes_healthy() -> None:
    """The service tells when it is healthy; nobody asks twice."""
    async with serving(ScriptedDecode(answer_hello)) as (server, address):
        await server.mark_not_serving()
        waiting = asyncio.create_task(wait_serving(address, DECODE_SERVICE))
        await server.mark_serving()

        await asyncio.wait_for(waiting, 10)


async def test_wait_fails_when_the_service_goes_away() -> None:
    """Waiting for a service that ended would never end."""
    async with serving(ScriptedDecode(answer_hello)) as (server, address):
        await server.mark_not_serving()
        waiting = asyncio.create_task(wait_serving(address, DECODE_SERVICE))
        await server.stop(0)

        with pytest.raises(RemoteFailure):
            await asyncio.wait_for(waiting, 10)
