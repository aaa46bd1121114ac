"""A server binds what it says, tells its health and answers clients that nobody here wrote."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from common.errors import ConfigError
from common.wire.channel import make_channel
from common.wire.server import Server, connection_options
from tests.support.wire import DECODE_SERVICE, ScriptedDecode, answer_hello, is_serving, serving

TOOLS = Path(sys.executable).parent


async def run_tool(name: str, *arguments: str, **environ: str) -> tuple[int | None, str]:
    """Run a command line client; returns its status and what it printed."""
    process = await asyncio.create_subprocess_exec(
        TOOLS / name,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environ},
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


@pytest.mark.multiprocess
async def test_reflection_answers_under_its_new_name(tmp_path: Path) -> None:
    """Clients that know only v1 of reflection work as well."""
    async with serving(ScriptedDecode(answer_hello)) as (_, address):
        options = ["curl", "--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", "grpc-v1"]
        options += ["--list-services", f"http://{address}"]
        status, output = await run_tool("buf", *options, BUF_CACHE_DIR=str(tmp_path))

    assert status == 0
    assert DECODE_SERVICE in output.split()


async def test_address_names_the_port_when_the_kernel_chose_it() -> None:
    """Port 0 is for tests and for two pairs on one host: the real one is told."""
    async with Server([]) as server:
        host, _, port = server.listen("127.0.0.1:0").rpartition(":")

    assert host == "127.0.0.1"
    assert int(port) > 0


async def test_name_is_bound_at_each_of_its_addresses() -> None:
    """Row Y20: what is told as ready is held, so that another service cannot have a part of it."""
    async with Server([]) as server:
        _, _, port = server.listen("localhost:0").rpartition(":")

        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", int(port)))
        # Without IPv6 it is another problem that this address has.
        with pytest.raises(OSError):  # noqa: PT011 (see above)
            socket.create_server(("::1", int(port)), family=socket.AF_INET6)


@pytest.mark.parametrize(("user", "lines"), [(0, ["listen.as_root"]), (12345, [])])
async def test_root_is_warned_of_a_port(
    user: int, lines: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever reaches a port can use it, and what it does then is done as root."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    async with Server([]) as server:
        server.listen("127.0.0.1:0")

    assert [record.message for record in caplog.records] == lines


async def test_port_is_refused_when_another_server_has_it() -> None:
    """Two servers never share a port in silence."""
    async with Server([]) as first, Server([]) as second:
        address = first.listen("127.0.0.1:0")

        with pytest.raises(ConfigError, match=f"listen={address}: cannot listen: Address already in use"):
            second.listen(address)


@pytest.mark.parametrize("name", ["a#b", "a?b", "a b", "a%20b", "a%", "caf\xe9", "a&b=c", "a:b", 'a"b'])
async def test_any_name_of_a_socket_is_one_and_the_same_for_both_ends(tmp_path: Path, name: str) -> None:
    """Row Y22: grpc reads a path as part of a URI, on one side more than on the other."""
    async with serving(ScriptedDecode(answer_hello), f"unix:{tmp_path}/{name}") as (server, address):
        await server.mark_serving()
        async with make_channel(address) as channel:
            assert await is_serving(channel)
        assert os.listdir(tmp_path) == [name]


async def test_socket_is_refused_when_another_server_has_it(tmp_path: Path) -> None:
    """The socket of a running server is not taken away from it."""
    address = f"unix:{tmp_path}/x.sock"
    async with serving(ScriptedDecode(answer_hello), address), Server([]) as second:
        with pytest.raises(ConfigError, match="another process listens"):
            second.listen(address)

        async with make_channel(address) as channel:
            assert await is_serving(channel)


async def test_socket_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Whoever may connect may use the service, so the file is 0600 whatever the umask."""
    path = tmp_path / "x.sock"
    async with Server([]) as server:
        server.listen(f"unix:{path}")

        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_socket_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    """A service that was killed can be started again on the same path."""
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    scripted = serving(ScriptedDecode(answer_hello), f"unix:{path}")
    async with scripted as (_, address), make_channel(address) as channel:
        assert await is_serving(channel)


async def test_socket_file_is_gone_when_the_server_has_stopped(tmp_path: Path) -> None:
    """A clean stop leaves no file."""
    path = tmp_path / "x.sock"
    async with serving(ScriptedDecode(answer_hello), f"unix:{path}"):
        assert path.exists()

    assert not path.exists()


def test_connections_are_fewer_and_shorter_where_descriptors_are_few() -> None:
    """A connection that was not greeted ends no later than one that is idle."""
    few, many = dict(connection_options(264)), dict(connection_options(1_000_000))

    assert few == {
        "grpc.max_allowed_incoming_connections": 200,
        "grpc.max_connection_idle_ms": 3125,
        "grpc.server_handshake_timeout_ms": 3125,
    }
    assert many["grpc.max_connection_idle_ms"] == 60_000
    assert many["grpc.server_handshake_timeout_ms"] == 10_000


async def test_health_is_not_serving_until_it_is_said() -> None:
    """A service that loads its model answers, and says that it does not work yet."""
    async with Server([DECODE_SERVICE]) as server:
        address = server.listen("127.0.0.1:0")
        await server.start()
        async with make_channel(address) as channel:
            before = await is_serving(channel, DECODE_SERVICE)
            await server.mark_serving()
            after = await is_serving(channel, DECODE_SERVICE)

    assert (before, after) == (False, True)


async def test_watchers_learn_at_once_that_a_server_drains() -> None:
    """Supervisors stop sending work while calls are still taken."""
    async with serving(ScriptedDecode(answer_hello)) as (server, address), make_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=DECODE_SERVICE)
        )
        first = await watch.read()
        await server.shut_down()
        second = await watch.read()
        watch.cancel()

    assert (first.status, second.status) == (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )


async def test_server_stops_twice_without_harm() -> None:
    """Stopping is idempotent, so that a signal and an error may both do it."""
    async with Server([]) as server:
        server.listen("127.0.0.1:0")
        await server.start()
        await server.stop(0.0)

        await server.grpc.wait_for_termination()
