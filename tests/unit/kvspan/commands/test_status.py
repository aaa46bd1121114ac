"""`kvspan status` shows the whole status to people and to programs."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvspan import cli
from kvspan.commands.command import EXIT_OK
from kvspan.commands.status import status_lines
from kvspan.v1 import decode_pb2 as pb
from kvspan.v1 import transfer_pb2
from kvspan.v1.geometry_pb2 import ENGINE_ORIGIN_DECLARED, EngineFacts
from tests.support.wire import ScriptedDecode, answer_hello, serving


async def test_json_shows_zeros_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A program finds every field, set or not, on one line."""
    async with serving(ScriptedDecode(answer_hello)) as (_, address):
        code = await asyncio.to_thread(cli.main, ["status", f"--target={address}", "--json"])

    output = capsys.readouterr().out
    status = json.loads(output)
    assert code == EXIT_OK
    assert output.count("\n") == 1
    assert (status["num_steps"], status["lanes_used"], status["peers"]) == ("13", 0, [])


async def test_text_is_printed_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a flag the status is for people."""
    async with serving(ScriptedDecode(answer_hello)) as (_, address):
        await asyncio.to_thread(cli.main, ["status", f"--target={address}"])

    assert "13 steps" in capsys.readouterr().out


def test_lines_name_groups_and_peers() -> None:
    """Each group and each peer has its line; a peer that is not open says why."""
    status = pb.GetStatusResponse(
        boot_id="b1",
        lanes_used=2,
        lanes_total=5,
        num_steps=17,
        num_tokens=29,
        queue_limit=9,
        reservations=pb.ReservationCounts(queued=1, transferring=3, decoding=2, draining=4),
        requests=pb.RequestCounts(submitted=31, finished=19, failed=6, cancelled=5, refused=1),
        prompts_remote=23,
        prompts_local=8,
        groups=[pb.GroupStatus(group_index=1, total_pages=40, used_pages=7, page_bytes=6 << 10)],
        peers=[
            pb.PeerStatus(
                target="unix:/p",
                state=pb.SESSION_STATE_REFUSED,
                reason="KV_GEOMETRY_MISMATCH",
                problem="geometry differs",
                num_transfers=3,
                num_slots=2,
                slab_leased_bytes=5 << 20,
                slab_total_bytes=64 << 20,
                num_clock_errors=7,
            )
        ],
    )

    assert list(status_lines(status)) == [
        "boot b1: 2 of 5 lanes used, 17 steps, 29 tokens",
        "now: 1 queued (limit 9), 3 transferring, 2 decoding, 4 draining",
        "requests: 31 submitted, 19 finished, 6 failed, 5 cancelled, 1 refused",
        "prompts: 23 remote, 8 local",
        "group 1: 7 of 40 pages of 6.0 KiB used",
        "peer unix:/p: refused, 3 transfers, 2 slots, 5.0 MiB of 64.0 MiB leased, 7 clock errors",
        "  no session: KV_GEOMETRY_MISMATCH: geometry differs",
    ]


def test_an_open_peer_says_what_computes_there_and_how_it_differs() -> None:
    """An operator sees by whom prompts are computed, and that it is not as decode would."""
    engine = EngineFacts(name="npu", origin=ENGINE_ORIGIN_DECLARED)
    differences = [
        pb.FieldDifference(field="numerics.engine", decode_value="torch", prefill_value="npu 7"),
        pb.FieldDifference(field="numerics.chunk_tokens", decode_value="256", prefill_value="0"),
    ]
    peers = [
        pb.PeerStatus(state=pb.SESSION_STATE_OPEN, engine=engine),
        pb.PeerStatus(state=pb.SESSION_STATE_OPEN, engine=engine, differences=differences),
    ]

    lines = [line for line in status_lines(pb.GetStatusResponse(peers=peers)) if "engine" in line]

    engine_and_grid = "numerics.engine: torch here, npu 7 there; numerics.chunk_tokens: 256 here, 0 there"
    assert lines == [
        "  engine: npu (declared)",
        f"  engine: npu (declared), differs in {engine_and_grid}",
    ]


def test_what_should_be_zero_is_shown_when_it_is_not() -> None:
    """Nothing that is counted is shown nowhere, and a healthy service shows none of it."""
    status = pb.GetStatusResponse(
        requests=pb.RequestCounts(refused=9, queue_full=4, retried=3),
        peers=[
            pb.PeerStatus(
                target="unix:/p",
                state=pb.SESSION_STATE_OPEN,
                num_late_events=5,
                num_unknown_messages=6,
                num_duplicate_spans=7,
            )
        ],
        calls=transfer_pb2.CallCounts(exhausted=2, broken=1),
        journal=transfer_pb2.JournalStatus(num_lines=11, num_bytes=3 << 10, is_lost=True),
    )

    lines = list(status_lines(status))

    assert lines[2].endswith("9 refused, 4 of them by a full queue, 3 attempts repeated")
    assert lines[-3].endswith("leased, 5 late events, 6 unknown messages, 7 duplicate spans")
    assert lines[-2:] == [
        "calls: 2 refused unread, 1 broke",
        "journal: 11 lines, 3.0 KiB, LOST: nothing is written any more",
    ]
