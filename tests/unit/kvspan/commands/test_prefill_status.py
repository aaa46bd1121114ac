"""`kvspan status` at the address of a prefill service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from common.wire.server import Server
from kvspan import cli
from kvspan.commands.command import EXIT_OK
from kvspan.commands.prefill_status import prefill_status_lines
from kvspan.v1 import transfer_pb2 as pb
from kvspan.v1 import transfer_pb2_grpc

STATUS = pb.PrefillServiceGetStatusResponse(
    boot_id="b2",
    num_queued=5,
    sessions=[
        pb.PrefillSessionStatus(
            session=4,
            peer_boot_id="b1",
            state=pb.PREFILL_SESSION_STATE_OPEN,
            slab_bytes=64 << 20,
            pinned_bytes=5 << 20,
            num_queued=3,
            num_running=1,
            num_sealed_spans=2,
            goes_last=True,
        ),
        pb.PrefillSessionStatus(session=7, state=pb.PREFILL_SESSION_STATE_WAITING),
    ],
    running=pb.RunningPrefill(
        request_id="b1-000012",
        session=4,
        transfer_id=9,
        num_tokens=300,
        phase=pb.PREFILL_PHASE_WAITING_FOR_CREDIT,
        run_time=Duration(seconds=2, nanos=250_000_000),
        wait_time=Duration(nanos=600_000_000),
    ),
    totals=pb.PrefillTotals(
        sessions_opened=6,
        sessions_ended=5,
        accepted=31,
        done=11,
        failed=7,
        cancelled=4,
        expired=3,
        abandoned=2,
        refused=1,
        sealed_spans=80,
        sealed_bytes=3 << 20,
        ignored=pb.IgnoredCounts(
            unknown_messages=12, repeated_starts=13, ignored_releases=14, dropped_spans=15
        ),
    ),
    calls=pb.CallCounts(exhausted=9),
    journal=pb.JournalStatus(num_lines=17, num_bytes=2 << 10),
)


class ScriptedPrefill(transfer_pb2_grpc.PrefillServiceServicer):
    """A prefill service that knows its status, and nothing of decode."""

    async def GetStatus(  # noqa: N802 - name given by the contract
        self, request: pb.PrefillServiceGetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PrefillServiceGetStatusResponse:
        """Return the status of this file."""
        return STATUS


@asynccontextmanager
async def serving_prefill() -> AsyncIterator[str]:
    """Run a scripted prefill service; yields its address."""
    async with Server(["kvspan.v1.PrefillService"]) as server:
        transfer_pb2_grpc.add_PrefillServiceServicer_to_server(ScriptedPrefill(), server.grpc)
        address = server.listen("127.0.0.1:0")
        await server.start()
        yield address


async def test_the_status_of_a_prefill_service_is_shown_at_its_address(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same command serves both, whoever answers."""
    async with serving_prefill() as address:
        codes = [
            await asyncio.to_thread(cli.main, ["status", f"--target={address}", *flags])
            for flags in ([], ["--json"])
        ]

    *lines, as_json = capsys.readouterr().out.splitlines()
    assert codes == [EXIT_OK, EXIT_OK]
    assert lines == list(prefill_status_lines(STATUS))
    assert json.loads(as_json)["totals"]["accepted"] == "31"


def test_lines_name_the_running_request_and_each_session() -> None:
    """What is counted is shown."""
    assert list(prefill_status_lines(STATUS)) == [
        "prefill, boot b2: 2 sessions, 5 queued",
        (
            "engine: request b1-000012 (session 4, transfer 9), 300 tokens, waiting for credit for 0.6 s, "
            "2.2 s in all"
        ),
        "transfers: 31 accepted, 11 done, 7 failed, 4 cancelled, 3 expired, 2 abandoned; 1 refused",
        "sealed: 80 spans, 3.0 MiB",
        "sessions: 6 opened, 5 ended",
        "ignored: 12 unknown messages, 13 repeated starts, 14 releases, 15 dropped spans",
        (
            "session 4, boot b1: open, 3 queued, 1 running, 2 spans to release, 5.0 MiB of 64.0 MiB pinned, "
            "goes last"
        ),
        "session 7, boot ?: waiting, 0 queued, 0 running, 0 spans to release, 0 B of 0 B pinned",
        "calls: 9 refused unread",
        "journal: 17 lines, 2.0 KiB",
    ]


def test_an_engine_that_has_nothing_is_idle() -> None:
    """And one that computes waits for nobody."""
    computing = pb.RunningPrefill(request_id="b1-1", phase=pb.PREFILL_PHASE_COMPUTING)

    idle = list(prefill_status_lines(pb.PrefillServiceGetStatusResponse()))[1]
    busy = list(prefill_status_lines(pb.PrefillServiceGetStatusResponse(running=computing)))[1]

    assert idle == "engine: idle"
    assert busy == "engine: request b1-1 (session 0, transfer 0), 0 tokens, computing, 0.0 s in all"
