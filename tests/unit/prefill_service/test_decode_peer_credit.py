"""One session of the prefill service whose slot is a ring: credit comes in, waits end."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.kv.digest import DigestKind, digest
from common.kv.ranges import Range
from common.session.messages import (
    PrefillAccepted,
    PrefillCancelled,
    PrefillDone,
    ReleaseSpan,
    SpanSealed,
    TransferMode,
)
from tests.support.prefill_peers import PeerDesk, make_peer_desk
from tests.support.sessions import make_start

pytestmark = pytest.mark.usefixtures("leak_check")

SPAN_BYTES = 384


class RingDesk:
    """A session in which transfer 21 runs through a slot that holds one of its six spans."""

    def __init__(self, desk: PeerDesk, run: "asyncio.Task[None]") -> None:
        self.desk = desk
        self.run = run

    async def next_span(self) -> SpanSealed:
        """Return the next span sealed, compared with what lies in the slab."""
        message = await self.desk.peer.next_message()
        assert isinstance(message, SpanSealed)
        told = bytes(self.desk.slab.view(message.span.offset, message.span.length))
        assert message.span.digest == digest(DigestKind.XXH3_64, told)
        return message

    def release(self, sequence: int) -> None:
        """Give the bytes of a span back."""
        self.desk.peer.receive(ReleaseSpan(21, 1, sequence))


@pytest.fixture
async def window(slab_dir: Path) -> AsyncIterator[RingDesk]:
    """A transfer whose first span will be told, and whose second waits for credit."""
    with make_peer_desk(slab_dir) as desk:
        await desk.greet()
        desk.peer.receive(replace(make_start(21), slot_size=SPAN_BYTES, mode=TransferMode.STREAM))
        assert await desk.peer.next_message() == PrefillAccepted(21, 1, 0)
        yield RingDesk(desk, asyncio.create_task(desk.run(await desk.take())))
        assert desk.peer.statistics().num_jobs == 0
        desk.peer.close()
        assert desk.idle == [desk.peer]


async def test_every_release_lets_one_span_more_be_told(window: RingDesk) -> None:
    """The same bytes carry the whole prompt, one span after another."""
    for sequence in range(6):
        told = await window.next_span()
        assert told.span.sequence == sequence
        assert Range(4096, 4096 + SPAN_BYTES).contains(told.span.extent)
        window.release(sequence)

    await window.run
    assert isinstance(await window.desk.peer.next_message(), PrefillDone)
    assert window.desk.peer.statistics().released_spans == 6


async def test_a_release_twice_is_no_credit(window: RingDesk) -> None:
    """The second span is not released by the word for the first."""
    await window.next_span()
    window.release(0)
    second = await window.next_span()
    before = bytes(window.desk.slab.view(second.span.offset, SPAN_BYTES))

    window.release(0)
    window.release(2)
    window.desk.cancel()
    await window.run

    assert window.desk.peer.statistics().ignored_releases == 2
    assert bytes(window.desk.slab.view(second.span.offset, SPAN_BYTES)) == before


async def test_a_cancel_ends_the_wait_for_credit(window: RingDesk) -> None:
    """At once, and it is said when nothing is written any more."""
    await window.next_span()

    window.desk.cancel()
    await window.run

    assert await window.desk.said(1) == [PrefillCancelled(21, 1)]


async def test_the_end_of_the_stream_ends_the_wait_for_credit(window: RingDesk) -> None:
    """No release can come any more; the slab is unmapped when the engine has let go."""
    await window.next_span()

    window.desk.peer.close()
    await window.run

    assert window.desk.idle == [window.desk.peer]
    assert window.desk.num_mappings == 1
