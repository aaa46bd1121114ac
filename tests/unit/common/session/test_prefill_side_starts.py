"""Which jobs a prefill session starts, which it refuses, and under which ids."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.kv.ranges import Range
from common.session.actions import Send
from common.session.messages import CancelPrefill, PrefillFailed, SpanSealed, TransferMode
from common.session.prefill_side import IgnoredCounts, PrefillSession
from tests.support.sessions import (
    OTHER,
    SPANS,
    START,
    finish_job,
    make_offer,
    make_open_prefill_session,
    make_queued_job,
    make_running_job,
    make_stopping_job,
    renamed,
    sent,
)

CANCEL = CancelPrefill(21, 1, "REQUEST_CANCELLED")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": ()}, "token_ids has 0 tokens, allowed 1 to 13"),
        ({"token_ids": (1,) * 14}, "token_ids has 14 tokens, allowed 1 to 13"),
        ({"token_ids": (1, 11, 2)}, "token_ids has 11, the vocabulary ends at 11"),
        ({"first_tokens": (6,)}, "first_tokens has 6, the prompt ends at 5"),
        ({"first_tokens": ()}, "first_tokens has 0 entries, the session 1 groups"),
        ({"first_tokens": (0, 0)}, "first_tokens has 2 entries, the session 1 groups"),
        ({"slot_offset": 65_536 - 64}, "the slab at 65536"),
        ({"slot_size": 1 << 40}, "the slab at 65536"),
        ({"slot_offset": 12_288 - 64}, "overlaps [4096, 12288) of transfer 21"),
        ({"slot_offset": 0}, "overlaps [4096, 12288) of transfer 21"),
    ],
)
def test_a_start_that_cannot_be_served_is_refused_alone(changes: dict[str, object], words: str) -> None:
    """Rule 8: the refusal names field, value and limit, and the neighbour runs on."""
    session = make_running_job()
    wrong = replace(START, transfer_id=22, **changes)  # type: ignore[arg-type]

    actions = session.receive(wrong)

    (refusal,) = sent(actions)
    assert len(actions) == 1
    assert isinstance(refusal, PrefillFailed)
    assert (refusal.transfer_id, refusal.attempt, refusal.reason) == (22, 1, "START_REFUSED")
    assert words in refusal.message
    assert session.statistics().num_jobs == 1


@pytest.mark.parametrize(("offset", "size"), [(12_288, 4096), (0, 4096)])
def test_slots_may_touch(offset: int, size: int) -> None:
    """Half-open ranges that meet share no byte."""
    session = make_running_job()

    session.receive(renamed(START, 22, Range(offset, offset + size)))

    assert session.statistics().num_jobs == 2
    session.check_integrity()


def test_a_start_above_the_concurrency_is_refused() -> None:
    """A2: told at once, so that decode frees its reservation."""
    session = make_open_prefill_session(replace(make_offer(), max_concurrency=1))
    session.receive(START)

    assert "max_concurrency is 1" in str(sent(session.receive(OTHER)))


def test_a_mode_that_was_not_agreed_is_refused() -> None:
    """The intersection of both offers binds both."""
    session = make_open_prefill_session(replace(make_offer(), modes=(TransferMode.WHOLE,)))

    assert "mode is stream, agreed ['whole']" in str(sent(session.receive(START)))


@pytest.mark.parametrize("make", [make_queued_job, make_running_job, make_stopping_job])
def test_a_live_id_that_is_started_again_is_ignored(make: Callable[[], PrefillSession]) -> None:
    """I4, concurrent: any answer would name the first job, so it is counted, and the first is unharmed."""
    session = make()
    before = session.statistics()

    assert session.receive(replace(OTHER, transfer_id=21)) == ()
    assert session.statistics() == replace(before, ignored=IgnoredCounts(repeated_starts=1))


@pytest.mark.parametrize("transfer_id", [21, 20])
def test_an_id_that_was_passed_is_refused(transfer_id: int) -> None:
    """I4, serial: used and ended, or skipped; the session goes on."""
    session = make_running_job()
    finish_job(session)
    session.receive(OTHER)

    (refusal,) = sent(session.receive(replace(START, transfer_id=transfer_id)))

    assert isinstance(refusal, PrefillFailed)
    assert refusal.transfer_id == transfer_id
    assert session.statistics().num_jobs == 1


def test_a_refused_start_uses_its_id_up() -> None:
    """A second try of the same request is another transfer."""
    session = make_open_prefill_session()
    session.receive(replace(START, token_ids=()))

    (refusal,) = sent(session.receive(START))

    assert isinstance(refusal, PrefillFailed)
    assert session.statistics().num_jobs == 0


def test_equal_ids_of_two_decode_services_are_two_jobs() -> None:
    """I6: each session has its own jobs and its own slab."""
    ours, theirs = make_running_job(), make_running_job()

    theirs.receive(CANCEL)

    assert ours.span_written(SPANS[0]) == (Send(SpanSealed(SPANS[0])),)
    assert theirs.span_written(SPANS[0]) == ()
