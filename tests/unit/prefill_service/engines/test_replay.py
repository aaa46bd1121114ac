"""An engine without a model."""

from __future__ import annotations

import pytest

from common.engine.checks import check_engine
from common.kv.ranges import Range
from kvspan.conformance import ENGINE_CHECKS, Check, EngineSubject, Skipped
from prefill_service.engines.replay import ReplayEngine, make_engine
from tests.support.models import RecordingWriter, never
from tests.support.setups import make_setup

OPTIONS = ("layers=3", "kv_heads=2", "head_dim=8", "dtype=float32", "vocab=11")


def make(*options: str) -> ReplayEngine:
    """Return a small engine."""
    return make_engine(make_setup("none", (*OPTIONS, *options), max_prompt_tokens=40))


def test_it_delivers_layer_by_layer_what_is_wanted() -> None:
    """And the number above the last token."""
    engine, writer = make(), RecordingWriter()
    check_engine("engine", "replay", engine)

    logits = engine.prefill([5, 9], {0: Range(0, 2), 1: Range(2, 2), 2: Range(1, 2)}, writer, never)

    assert [(layer, tokens) for layer, tokens, *_ in writer.writes] == [(0, Range(0, 2)), (2, Range(1, 2))]
    assert int(logits.argmax()) == 10


def test_its_pace_is_its_longest_step() -> None:
    """Whoever waits for it waits that much longer."""
    assert make("layer_ms=2.5").describe().longest_step_ms == 3


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=str)
def test_it_keeps_the_rules(check: Check[EngineSubject]) -> None:
    """All but the comparison with a reference."""
    subject = EngineSubject(make(), num_prompts=50)

    if check.name == "reference":
        with pytest.raises(Skipped):
            check.run(subject)
    else:
        check.run(subject)
