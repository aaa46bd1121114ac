"""One session of the prefill service whose slot is a ring: credit comes in, waits end."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import LeaseExpired
from common.kv.digest import DigestKind, digest
from common.kv.ranges import Range
from common.session.messages import (
    PrefillAccepted,
    PrefillCancelled,
    PrefillDone,
    PrefillFailed,
    ReleaseSpan,
    SpanSealed,
    TransferMode,
)
from prefill_service.job import Job
from tests.support.prefill_peers import PeerDesk, make_peer_desk
from tests.support.sessions import make_start

pytestmark = pytest.mark.usefixtures("leak_check")

SPAN_BYTES = 384


class RingDesk:
    """A session in which transfer 21 runs through a slot that holds one of its six spans."""

    def __init__(self, desk: PeerDesk, job: Job) -> None:
        self.desk = desk
        self.job = job
        self.run = asyncio.create_task(desk.run(job))

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

    async def until_waiting(self) -> None:
        """Return when the engine waits for credit."""
        # The engine's thread says nothing when it begins to wait: there is no event to wait for.
        while not self.job.is_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    @property
    def is_last(self) -> bool:
        """Whether the session goes after all others."""
        return self.desk.is_last


@pytest.fixture
async def ring(slab_dir: Path) -> AsyncIterator[RingDesk]:
    """A transfer whose first span will be sealed, and whose second waits for credit."""
    with make_peer_desk(slab_dir) as desk:
        await desk.greet()
        desk.peer.receive(replace(make_start(21), slot_size=SPAN_BYTES, mode=TransferMode.STREAM))
        assert await desk.peer.next_message() == PrefillAccepted(21, 1, 0)
        yield RingDesk(desk, desk.take())
        assert desk.peer.statistics().num_jobs == 0
        desk.peer.close()
        assert desk.idle == [desk.peer]


async def test_every_release_lets_one_span_more_be_told(ring: RingDesk) -> None:
    """The same bytes carry the whole prompt, one span after another."""
    for sequence in range(6):
        told = await ring.next_span()
        assert told.span.sequence == sequence
        assert Range(4096, 4096 + SPAN_BYTES).contains(told.span.extent)
        ring.release(sequence)

    await ring.run
    assert isinstance(await ring.desk.peer.next_message(), PrefillDone)


async def test_a_cancel_ends_the_wait_for_credit(ring: RingDesk) -> None:
    """At once, and it is said when nothing is written any more."""
    await ring.next_span()

    ring.desk.cancel()
    await ring.run

    assert await ring.desk.said(1) == [PrefillCancelled(21, 1)]


async def test_the_end_of_the_stream_ends_the_wait_for_credit(ring: RingDesk) -> None:
    """No release can come any more; the slab is unmapped when the engine has let go."""
    await ring.next_span()

    ring.desk.peer.close()
    await ring.run

    assert ring.desk.idle == [ring.desk.peer]
    assert ring.desk.num_mappings == 1


async def test_a_session_that_keeps_the_engine_waiting_until_a_time_limit_goes_last(ring: RingDesk) -> None:
    """It may choose its limits below every bound of credit."""
    await ring.next_span()
    await ring.until_waiting()

    ring.desk.peer._jobs._expire(ring.job)  # as its timer does
    await ring.run

    (failed,) = await ring.desk.said(1)
    assert isinstance(failed, PrefillFailed)
    assert (failed.reason, ring.is_last) == (LeaseExpired.code, True)


async def test_what_a_prompt_waited_for_credit_is_said_once(
    ring: RingDesk, caplog: pytest.LogCaptureFixture
) -> None:
    """With its request, not for each of its spans."""
    caplog.set_level(logging.INFO)
    await ring.next_span()
    await ring.until_waiting()

    ring.desk.cancel()
    await ring.run

    (fields,) = [vars(one)["fields"] for one in caplog.records if one.msg == "credit.waited"]
    names = {"request_id": ring.job.target.start.request_id, "session": 3, "transfer_id": 21}
    assert fields == {**names, "waits": 1, "waited_s": 0.0}
