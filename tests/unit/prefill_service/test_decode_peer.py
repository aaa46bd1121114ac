"""One session of the prefill service: what it says, what it keeps mapped, and when it is gone."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import GeometryMismatch, LeaseExpired, SlabNotShared
from common.kv.digest import DigestKind, digest
from common.kv.spans import SPAN_LAYOUT
from common.session.messages import (
    GoAway,
    Ping,
    Pong,
    PrefillAccepted,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    SlabHandle,
    Welcome,
)
from common.slab.segment import SlabSegment
from prefill_service.decode_peer import MAX_UNSAID
from tests.support.factories import make_geometry
from tests.support.prefill_peers import PeerDesk, spans_of, turns
from tests.support.sessions import NONCE, make_hello, make_identity, make_spans, make_start, make_totals

pytestmark = pytest.mark.usefixtures("leak_check")


async def test_hello_maps_the_slab_and_answers_with_its_nonce(desk: PeerDesk) -> None:
    """The nonce proves that both see the same memory."""
    welcome = await desk.greet()

    assert isinstance(welcome, Welcome)
    assert welcome.nonce == desk.slab.nonce != NONCE
    assert desk.num_mappings == 2


async def test_a_slab_that_cannot_be_mapped_is_refused_by_name(desk: PeerDesk) -> None:
    """The two services do not share the slab directory."""
    name = "kvspan-000000000000000000000000.sock"
    hello = make_hello()

    desk.peer.receive(replace(hello, slab=SlabHandle(name, 65_536, hello.slab.layout)))

    with pytest.raises(SlabNotShared, match=r"slab\.socket: .* prefill cannot open it in --slab-dir"):
        await desk.peer.map_slab()


async def test_a_session_that_ends_while_its_slab_is_mapped_keeps_no_mapping(desk: PeerDesk) -> None:
    """A large slab takes a while, beside the event loop; nothing waits for it afterwards."""
    desk.peer.receive(replace(make_hello(), slab=SlabHandle(desk.slab.name, 65_536, SPAN_LAYOUT)))
    mapping = asyncio.create_task(desk.peer.map_slab())
    await asyncio.sleep(0)
    was_mapping = desk.peer.is_mapping

    desk.peer.close()
    await mapping

    assert (was_mapping, desk.peer.is_mapping) == (True, False)
    assert desk.num_mappings == 1
    assert desk.idle == [desk.peer]


async def test_a_peer_that_does_not_fit_maps_nothing(desk: PeerDesk) -> None:
    """Differences are found before memory is touched."""
    with pytest.raises(GeometryMismatch):
        desk.peer.receive(make_hello(make_identity(make_geometry(head_dim=16))))

    assert desk.num_mappings == 1


async def test_a_start_is_accepted_and_queued(desk: PeerDesk) -> None:
    """The job has the slot's bytes and nothing beside them."""
    await desk.greet()

    start = make_start()
    desk.peer.receive(start)

    assert await desk.peer.next_message() == PrefillAccepted(21, 1, 0)
    job = desk.take()
    assert (job.key, len(job.target.memory)) == ((3, 21), start.slot_size)
    job.target.memory[:3] = b"abc"
    assert bytes(desk.slab.view(start.slot_offset, 3)) == b"abc"
    await desk.run(job)


async def test_a_job_is_told_span_by_span_and_then_done(desk: PeerDesk) -> None:
    """Every span before the end, and what decode reads is what was told."""
    await desk.greet()
    start = await desk.start()
    expected = [(span.offset, span.length) for span in make_spans(start)]

    await desk.run(desk.take())

    *told, done = await desk.said(len(expected) + 1)
    spans = spans_of(told)
    assert [(span.offset, span.length) for span in spans] == expected
    for span in spans:
        assert span.digest == digest(DigestKind.XXH3_64, desk.slab.view(span.offset, span.length))
    assert isinstance(done, PrefillDone)
    assert done.totals == make_totals(spans)
    assert desk.peer.statistics().num_jobs == 0


async def test_a_running_job_says_cancelled_only_when_the_engine_has_ended(desk: PeerDesk) -> None:
    """The word is the proof that no byte moves any more; spans written meanwhile are not told."""
    await desk.greet()
    await desk.start()
    job = desk.take()

    desk.cancel()
    assert job.stop.is_set()
    assert desk.peer.statistics().num_jobs == 1
    job.stop.clear()
    await desk.run(job)

    assert await desk.said(1) == [PrefillCancelled(21, 1)]
    assert desk.peer.statistics().ignored.dropped_spans == 6
    assert desk.peer.statistics().num_jobs == 0


async def test_a_queued_job_fails_when_its_time_is_over(desk: PeerDesk) -> None:
    """The lease ends by the producer's own clock, without any message of decode."""
    await desk.greet()
    await desk.start(time_limit_s=0.001)

    (failed,) = await desk.said(1)

    assert isinstance(failed, PrefillFailed)
    assert (failed.reason, failed.message) == (LeaseExpired.code, "prefill did not end within 0.001 s")
    assert len(desk.queue) == 0


async def test_a_running_job_is_stopped_when_its_time_is_over(desk: PeerDesk) -> None:
    """The engine is told to stop, and the verdict waits for its end.

    Its session is not put last: the prompt waited for its turn, or is long, and would be later still.
    """
    await desk.greet()
    await desk.start(time_limit_s=0.001)
    job = desk.take()

    await asyncio.to_thread(job.stop.wait)
    assert desk.peer.statistics().num_jobs == 1
    await desk.run(job)

    (failed,) = await desk.said(1)
    assert isinstance(failed, PrefillFailed)
    assert (failed.reason, desk.is_last) == (LeaseExpired.code, False)


async def test_closing_while_the_engine_runs_keeps_the_slab_until_it_ends(desk: PeerDesk) -> None:
    """A producer never writes into memory that is gone, and says nothing more."""
    await desk.greet()
    await desk.start(21)
    await desk.start(22)
    job = desk.take()

    desk.peer.close()
    assert job.stop.is_set()
    assert (len(desk.queue), desk.num_mappings, desk.idle) == (0, 2, [])
    await desk.run(job)

    assert desk.num_mappings == 1
    assert desk.idle == [desk.peer]
    assert await desk.said(1) == [None]


async def test_a_slab_stays_taken_while_the_engine_writes_for_a_session_that_has_ended(
    desk: PeerDesk, slab_dir: Path
) -> None:
    """A new session that names it would have its spans overwritten (rule 4)."""
    await desk.greet()
    await desk.start(21)
    job, slabs = desk.take(), desk.context.slabs
    desk.peer.close()

    with pytest.raises(SlabNotShared, match="has it in another session"):
        await asyncio.to_thread(SlabSegment.attach, slab_dir, desk.slab.name, desk.slab.size_bytes, slabs)

    await desk.run(job)
    assert slabs.statistics().num_slabs == 0


async def test_a_drain_is_told_while_a_job_goes_on(desk: PeerDesk) -> None:
    """Decode hears it before the end of its job, and leaves after that."""
    await desk.greet()
    start = await desk.start()

    desk.peer.leave()
    desk.peer.leave()

    assert await desk.said(1) == [GoAway("the prefill service is shutting down")]
    await desk.run(desk.take())
    *_, done = await desk.said(len(make_spans(start)) + 1)
    assert isinstance(done, PrefillDone)


@pytest.mark.parametrize(("offset", "size"), [(0, 4096), (4095, 64), (65_536, 64), (61_440, 8192)])
async def test_a_slot_outside_the_slab_s_data_fails_its_transfer_alone(
    desk: PeerDesk, offset: int, size: int
) -> None:
    """The header is nobody's to write; the session goes on."""
    await desk.greet()

    desk.peer.receive(replace(make_start(21), slot_offset=offset, slot_size=size))

    (failed,) = await desk.said(1)
    assert isinstance(failed, PrefillFailed)
    assert failed.reason == "START_REFUSED"
    await desk.start(22)
    desk.cancel(22)


async def test_a_peer_that_does_not_read_is_not_heard(desk: PeerDesk) -> None:
    """Its questions must not fill our memory with answers."""
    await desk.greet()
    for number in range(MAX_UNSAID):
        desk.peer.receive(Ping(number))
    await desk.peer.wait_heard()

    desk.peer.receive(Ping(MAX_UNSAID))
    heard = asyncio.create_task(desk.peer.wait_heard())
    await turns()
    assert not heard.done()

    assert await desk.peer.next_message() == Pong(0)
    await heard
