"""What a prefill leaves and seals when its slot is smaller than the prompt's KV."""

import pytest

from common.errors import LeaseExpired
from common.kv.coverage import Coverage
from common.session.messages import TransferMode
from tests.support.factories import make_geometry
from tests.support.fakes import PatternEngine, all_wanted
from tests.support.sessions import make_totals
from tests.support.span_desk import GRANULARITY, GUARD, HYBRID, SpanDesk

MODES = (TransferMode.STREAM, TransferMode.WHOLE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("prompt_len", "first_token"), [(9, 0), (21, 0), (21, 11), (61, 0)])
def test_a_prompt_crosses_the_smallest_ring(mode: TransferMode, prompt_len: int, first_token: int) -> None:
    """Every span has its rows when it is sealed, and all is covered though bytes are used again."""
    desk = SpanDesk(HYBRID, prompt_len, first_token, mode, is_ring=True)
    coverage = Coverage(HYBRID.groups, HYBRID.required(first_token, prompt_len), desk.slot)

    totals = desk.prefill()

    for span in desk.sealed:
        coverage.place(span)
        coverage.release(span.sequence)
    assert coverage.is_complete, coverage.missing()
    assert totals == make_totals(desk.sealed, 2)
    assert [span.sequence for span in desk.sealed] == list(range(len(desk.sealed)))
    assert desk.ring is not None
    assert desk.ring.statistics().held_bytes == 0
    desk.assert_guarded()


def test_whole_through_a_ring_seals_nothing_while_it_computes() -> None:
    """It waits for the end as it does with a slot for everything, and then seals each span when copied."""
    desk = SpanDesk(HYBRID, 21, mode=TransferMode.WHOLE, is_ring=True)
    engine = PatternEngine(HYBRID, GRANULARITY.chunk_tokens)

    engine.prefill(list(desk.tokens), all_wanted(HYBRID, 21), desk.writer, lambda: False)

    assert not desk.sealed
    assert desk.memory.count(GUARD) == len(desk.memory)
    desk.writer.finish()
    assert desk.sealed


@pytest.mark.parametrize("mode", MODES)
def test_a_span_that_gets_no_credit_writes_no_byte(mode: TransferMode) -> None:
    """Rule 5: what is sealed and not released stays as it was sealed, and the prompt fails."""
    desk = SpanDesk(make_geometry(), 21, mode=mode, is_ring=True, is_paused=True)

    with pytest.raises(LeaseExpired, match=r"no credit for 1536 bytes of group 0 .*1 spans sealed"):
        desk.prefill()

    (span,) = desk.sealed
    desk.assert_span(span)
    desk.assert_guarded()
