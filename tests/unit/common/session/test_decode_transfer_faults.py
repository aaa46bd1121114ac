"""What a wrong, early, late or lost event costs a transfer, and when its bytes may be reused."""

import math
from dataclasses import replace

import pytest

from common.errors import (
    ChecksumMismatch,
    CoverageIncomplete,
    KVSpanError,
    LocalProtocolError,
    LogitsInvalid,
    PeerLost,
    PrefillEngineFailed,
    PrefillFailed,
    SpanOutOfRange,
    SpanOverlap,
    StaleGeneration,
    TotalsMismatch,
)
from common.kv.ranges import Range
from common.session.actions import TransferFailed
from common.session.messages import CancelPrefill
from common.session.transfer_states import TransferState
from tests.support.sessions import (
    SPANS,
    START,
    make_done,
    make_logits,
    sent,
)
from tests.support.transfers import (
    CAUSE,
    DONE,
    DRAINED,
    ENDS,
    IN_STATE,
    assert_failed,
    make_aborting_transfer,
    make_published_transfer,
    make_requested_transfer,
    make_streaming_transfer,
    make_transfer,
)


@pytest.mark.parametrize("state", [state for state in TransferState if state is not TransferState.COMPLETE])
def test_publication_needs_a_complete_transfer(state: TransferState) -> None:
    """Rule 2: there is one state from which a reservation may become readable."""
    with pytest.raises(LocalProtocolError):
        IN_STATE[state]().published()


@pytest.mark.parametrize("missing", range(len(SPANS)))
def test_done_before_coverage_fails_and_names_what_is_missing(missing: int) -> None:
    """W7, W8, H4: whatever span is absent, its layers and tokens are told and nothing is published."""
    told = [span for span in SPANS if span.sequence != missing]
    transfer = make_streaming_transfer(*told)

    actions = transfer.done(make_done(START, told))

    assert_failed(actions, CoverageIncomplete)
    assert str(SPANS[missing].tokens) in str(transfer.error)


def test_done_of_another_generation_fails_the_transfer() -> None:
    """Rule 2: Done of the same attempt and generation."""
    transfer = make_streaming_transfer(*SPANS)

    assert_failed(transfer.done(replace(DONE, generation=2)), StaleGeneration)


@pytest.mark.parametrize("field", ["num_spans", "num_bytes", "layer_tokens"])
@pytest.mark.parametrize("delta", [-1, 1])
def test_totals_that_disagree_fail_the_transfer(field: str, delta: int) -> None:
    """Each count of each group must be what was received."""
    total = DONE.totals[0]
    wrong = replace(total, **{field: getattr(total, field) + delta})

    actions = make_streaming_transfer(*SPANS).done(replace(DONE, totals=(wrong,)))

    assert_failed(actions, TotalsMismatch)


def test_totals_of_too_few_or_other_groups_fail_the_transfer() -> None:
    """One entry per group, by index."""
    for totals in ((), DONE.totals * 2, (replace(DONE.totals[0], group_index=1),)):
        assert_failed(make_streaming_transfer(*SPANS).done(replace(DONE, totals=totals)), TotalsMismatch)


@pytest.mark.parametrize(
    "logits",
    [
        b"",
        make_logits(10),
        make_logits(12),
        make_logits()[:-1],
        make_logits(at_0=math.nan),
        make_logits(at_10=math.inf),
        make_logits(at_4=-math.inf),
    ],
    ids=["empty", "short", "long", "torn", "nan", "inf", "minus inf"],
)
def test_logits_that_cannot_be_sampled_fail_the_transfer(logits: bytes) -> None:
    """A first token drawn from such logits would be plausible nonsense."""
    assert_failed(make_streaming_transfer(*SPANS).done(replace(DONE, logits=logits)), LogitsInvalid)


def test_a_failed_copy_fails_the_transfer() -> None:
    """A digest that does not match is the end of this transfer, and the producer is told to stop."""
    transfer = make_streaming_transfer(*SPANS[:2])

    actions = transfer.import_failed(1, ChecksumMismatch(1, "aa", "bb"))

    assert_failed(actions, ChecksumMismatch)
    assert sent(actions) == [CancelPrefill(21, 1, "KV_CHECKSUM")]


def test_an_exact_duplicate_is_counted_and_ignored() -> None:
    """While its first copy runs, and after it."""
    transfer = make_streaming_transfer(SPANS[0])

    assert transfer.span(SPANS[0]) == ()
    transfer.import_finished(0)
    assert transfer.span(SPANS[0]) == ()
    assert transfer.statistics().duplicates == 2
    assert transfer.state is TransferState.STREAMING


def test_duplicates_do_not_count_towards_totals() -> None:
    """Totals are of what was told once."""
    transfer = make_streaming_transfer(*SPANS, SPANS[3])

    assert transfer.done(DONE) == ()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"generation": 2}, StaleGeneration),
        ({"generation": 4}, StaleGeneration),
        ({"slot_id": 8}, SpanOutOfRange),
        ({"sequence": 0}, SpanOutOfRange),
        ({"group_index": 1}, SpanOutOfRange),
        ({"layers": Range(1, 3)}, SpanOutOfRange),
        ({"layers": Range(1, 1)}, SpanOutOfRange),
        ({"tokens": Range(4, 6)}, SpanOutOfRange),
        ({"tokens": Range(3, 3)}, SpanOutOfRange),
        ({"length": SPANS[1].length + 64}, SpanOutOfRange),
        ({"length": SPANS[1].length - 64}, SpanOutOfRange),
        ({"offset": 4096 - 64}, SpanOutOfRange),
        ({"offset": 12_288 - 64}, SpanOutOfRange),
        ({"offset": 1 << 62}, SpanOutOfRange),
        ({"offset": SPANS[1].offset + 1}, SpanOutOfRange),
        ({"layers": Range(0, 1)}, SpanOverlap),
        ({"offset": SPANS[0].offset}, SpanOverlap),
    ],
)
def test_a_wrong_field_of_a_span_fails_the_transfer(
    changes: dict[str, object], kind: type[KVSpanError]
) -> None:
    """Rule 3, N8: every field is checked against the reservation; nothing is imported."""
    transfer = make_streaming_transfer(SPANS[0])

    actions = transfer.span(replace(SPANS[1], **changes))  # type: ignore[arg-type]

    assert_failed(actions, kind)
    assert [type(message) for message in sent(actions)] == [CancelPrefill]


@pytest.mark.parametrize("copy_end", ["copy", "bad copy"])
@pytest.mark.parametrize("producer_end", ["cancelled", "failed", "done", "lost"])
@pytest.mark.parametrize("producer_first", [True, False])
def test_a_cancelled_transfer_drains_with_the_last_of_producer_and_copies(
    copy_end: str, producer_end: str, producer_first: bool
) -> None:
    """U2, U7: two witnesses in either order; only with the second may the slot be reused."""
    transfer = make_aborting_transfer()
    first, second = (producer_end, copy_end) if producer_first else (copy_end, producer_end)

    assert ENDS[first](transfer) == ()
    assert not transfer.is_drained
    assert ENDS[second](transfer) == (DRAINED,)
    assert transfer.state is TransferState.ENDED
    assert transfer.error is CAUSE


def test_every_copy_must_end_before_a_transfer_drains() -> None:
    """U1: the first failing copy frees nothing while its siblings still write."""
    transfer = make_streaming_transfer(*SPANS[:3])
    transfer.import_failed(1, ChecksumMismatch(1, "aa", "bb"))
    transfer.cancelled()

    assert transfer.import_finished(0) == ()
    assert transfer.import_finished(2) == (DRAINED,)


def test_a_cancelled_transfer_gives_no_credit() -> None:
    """A producer that was told to stop must not be encouraged to write."""
    assert sent(make_aborting_transfer().import_finished(0)) == []


def test_an_abort_before_start_drains_at_once() -> None:
    """Nothing was sent, so nothing moves and nobody is told."""
    assert make_transfer().abort(CAUSE) == (TransferFailed(21, CAUSE), DRAINED)


def test_a_failure_of_the_producer_ends_the_transfer_without_a_cancel() -> None:
    """PrefillFailed is the outcome and the proof of drain in one."""
    transfer = make_streaming_transfer(SPANS[0])

    actions = transfer.failed("ENGINE_FAILED", "a device was lost")

    assert_failed(actions, PrefillEngineFailed)
    assert sent(actions) == []
    assert transfer.import_finished(0) == (DRAINED,)


def test_a_cancel_nobody_asked_for_is_a_failure() -> None:
    """Never success over a producer that gave up."""
    assert_failed(make_streaming_transfer().cancelled(), PrefillFailed)


def test_a_refusal_before_acceptance_ends_the_transfer() -> None:
    """A2: the producer may fail a start that it never queued."""
    actions = make_requested_transfer().failed("START_REFUSED", "full")

    assert_failed(actions, PrefillFailed)
    assert actions[-1] == DRAINED


def test_done_of_another_generation_is_no_proof_of_drain() -> None:
    """Rule 4: a message about another lease says nothing of who still writes into this one."""
    transfer = make_streaming_transfer(*SPANS)
    for span in SPANS:
        transfer.import_finished(span.sequence)

    actions = transfer.done(replace(DONE, generation=2))

    assert DRAINED not in actions
    assert sent(actions) == [CancelPrefill(21, 1, "STALE_GENERATION")]
    assert transfer.cancelled() == (DRAINED,)


def test_a_stale_done_after_an_abort_is_no_proof_of_drain() -> None:
    """The same holds when the outcome is decided already."""
    transfer = make_aborting_transfer()
    transfer.import_finished(0)

    assert transfer.done(replace(DONE, generation=2)) == ()
    assert not transfer.is_drained


def test_the_loss_of_the_peer_fails_what_it_has_not_ended() -> None:
    """Nothing else can come of it; the copy that runs is waited for."""
    transfer = make_streaming_transfer(SPANS[0])

    assert_failed(transfer.producer_lost(PeerLost("stream broke")), PeerLost)
    assert transfer.import_finished(0) == (DRAINED,)


def test_the_loss_of_the_peer_changes_nothing_after_publication() -> None:
    """H6: what was published stays."""
    transfer = make_published_transfer()

    assert transfer.producer_lost(PeerLost("stream broke")) == ()
    assert transfer.state is TransferState.PUBLISHED
