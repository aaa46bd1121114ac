"""Two children live and end together, in order, and none is left."""

from __future__ import annotations

import asyncio
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from common.errors import ConfigError
from kvspan.commands.command import EXIT_USAGE
from kvspan.commands.pair import ChildEnded, Pair, PairPlan, socket_folder

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leak_check")]

SERVICE = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("loading", flush=True)
print("ready", sys.argv[1], flush=True)
signal.sigwait({signal.SIGTERM})
with open(sys.argv[2], "a") as log: print(sys.argv[1], file=log)
"""

DEAF = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready deaf", flush=True)
signal.sigwait({signal.SIGUSR1})
"""


def python(code: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs `code` without the packages of the project."""
    return (sys.executable, "-S", "-c", code, *arguments)


def make_plan(
    log: Path, *, decode: str = SERVICE, prefill: str = SERVICE, kill_after_s: float = 30
) -> PairPlan:
    """Return a plan whose children note their name in `log` when they are told to end."""
    return PairPlan(
        decode_command=python(decode, "decode", str(log)),
        prefill_command=python(prefill, "prefill", str(log)),
        kill_after_s=kill_after_s,
    )


async def nothing() -> None:
    """Announce nothing."""


async def test_addresses_are_those_that_the_children_tell(tmp_path: Path) -> None:
    """Lines before `ready` are passed over; the address is all that follows it, blanks and odd bytes too."""
    told = "import os; os.write(1, b'loading\\nready unix:/a\\xff \\n')"

    async with Pair(make_plan(tmp_path / "log", decode=told)) as pair:
        assert await pair.read_addresses() == ("unix:/a\udcff ", "prefill")


async def test_decode_ends_before_prefill_when_the_pair_drains(tmp_path: Path) -> None:
    """Prefill outlives decode, which may still wait for prompts; the exit code is 0."""
    log, drain = tmp_path / "log", asyncio.Event()

    async with Pair(make_plan(log)) as pair:

        async def announce() -> None:
            await pair.read_addresses()
            drain.set()

        code = await pair.run(drain, announce)

    assert code == 0
    assert log.read_text().split() == ["decode", "prefill"]


@pytest.mark.parametrize(("role", "survivor"), [("decode", "prefill"), ("prefill", "decode")])
async def test_child_that_ends_by_itself_ends_the_other(tmp_path: Path, role: str, survivor: str) -> None:
    """Half a pair serves nobody: the other half is drained and the caller is told who ended."""
    log, failing = tmp_path / "log", "raise SystemExit(7)"
    plan = make_plan(
        log,
        decode=failing if role == "decode" else SERVICE,
        prefill=failing if role == "prefill" else SERVICE,
    )

    with pytest.raises(ChildEnded, match=f"{role} ended with exit code 7"):
        async with Pair(plan) as pair:
            await pair.read_address(survivor)
            await pair.run(asyncio.Event(), nothing)

    assert log.read_text().split() == [survivor]


async def test_child_that_ends_before_it_is_ready_is_named(tmp_path: Path) -> None:
    """Whoever waits for an address learns that none will come, and why."""
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"

    async with Pair(make_plan(tmp_path / "log", decode=killed)) as pair:
        with pytest.raises(ChildEnded, match="decode ended with signal SIGKILL"):
            await pair.read_addresses()


async def test_what_a_child_refuses_is_told_once_by_the_pair(tmp_path: Path) -> None:
    """Both would refuse the same model: neither says so itself, and exit code 2 comes through."""
    refusing = "print('refused --model=x: no such folder'); raise SystemExit(2)"

    with pytest.raises(ChildEnded) as ended:
        async with Pair(make_plan(tmp_path / "log", decode=refusing, prefill=refusing)) as pair:
            await pair.run(asyncio.Event(), nothing)

    failure = ended.value.failure()
    assert (str(failure), failure.exit_code) == ("--model=x: no such folder", EXIT_USAGE)


async def test_failure_to_announce_ends_the_pair(tmp_path: Path) -> None:
    """An error while the pair is announced reaches the caller, and no child is left."""

    async def announce() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        async with Pair(make_plan(tmp_path / "log")) as pair:
            await pair.read_addresses()
            await pair.run(asyncio.Event(), announce)


@pytest.mark.parametrize(("kill_after_s", "hurries"), [(0.05, 0), (600, 2)], ids=["time", "hurry"])
async def test_child_that_does_not_listen_is_killed(
    tmp_path: Path, kill_after_s: float, hurries: int
) -> None:
    """When its time is over, or nobody waits for it; the exit code says that it was not clean."""
    drain = asyncio.Event()

    async with Pair(make_plan(tmp_path / "log", decode=DEAF, kill_after_s=kill_after_s)) as pair:
        await pair.read_addresses()
        drain.set()
        for _ in range(hurries):
            pair.hurry()
        code = await pair.run(drain, nothing)

    assert code == 1


SLOW = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", sys.argv[1], flush=True)
signal.sigwait({signal.SIGTERM})
with open(sys.argv[2], "a") as log: print(sys.argv[1], "drains", file=log)
signal.sigwait({signal.SIGTERM})
with open(sys.argv[2], "a") as log: print(sys.argv[1], "ends", file=log)
"""


async def test_children_that_are_hurried_are_told_again_and_end_in_order(tmp_path: Path) -> None:
    """They remove their files before they end, which a child that is killed cannot."""
    log, drain = tmp_path / "log", asyncio.Event()

    async with Pair(make_plan(log, decode=SLOW, prefill=SLOW, kill_after_s=600)) as pair:

        async def announce() -> None:
            await pair.read_addresses()
            drain.set()
            pair.hurry()

        code = await pair.run(drain, announce)

    assert code == 0
    assert log.read_text().splitlines() == [
        "decode drains",
        "decode ends",
        "prefill drains",
        "prefill ends",
    ]


async def test_an_engine_that_cannot_be_stopped_gives_its_child_that_much_more_time(tmp_path: Path) -> None:
    """Without it both would be killed at once, and neither note that it was told to end."""
    log, drain = tmp_path / "log", asyncio.Event()

    async with Pair(make_plan(log, kill_after_s=0)) as pair:
        await pair.read_addresses()
        pair.allow(600)
        drain.set()
        code = await pair.run(drain, nothing)

    assert code == 0
    assert log.read_text().split() == ["decode", "prefill"]


def test_sockets_of_a_pair_have_a_folder_of_their_own() -> None:
    """Nobody else can enter it, and nothing of it stays."""
    with socket_folder() as folder:
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700

    assert not Path(folder).exists()


def test_folder_that_is_too_long_for_a_socket_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row Y21: the error names the directory and what to do about it."""
    long = tmp_path / ("x" * 144)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    with pytest.raises(ConfigError, match=r"TMPDIR=.*the limit is 107; name a shorter one"), socket_folder():
        pass
    assert list(long.iterdir()) == []
