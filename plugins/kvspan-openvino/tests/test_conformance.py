"""The checks of kvspan that any engine must pass, on every family that is converted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.engine.prefill import PrefillEngine
from kvspan.conformance import ENGINE_CHECKS, Check, EngineSubject


@pytest.mark.parametrize("model", ["tiny:llama", "tiny:qwen3", "tiny:gemma3"])
@pytest.mark.parametrize("check", [one for one in ENGINE_CHECKS if one.name != "reference"], ids=str)
def test_the_engine_keeps_the_rules(
    engine_of: Callable[[str], PrefillEngine], model: str, check: Check[EngineSubject]
) -> None:
    """Numbers against transformers are compared in `test_engine.py`, where the tolerance is derived."""
    check.run(EngineSubject(engine_of(model)))
