"""Both services prepare a model in the same way."""

from __future__ import annotations

from common.model.prepare import prepare
from decode_service.config import DecodeConfig
from prefill_service.config import PrefillConfig


def test_both_services_are_the_same_towards_each_other() -> None:
    """One model, one grid: identities fit, whatever batch or longest prompt each is prepared for."""
    decode = DecodeConfig(model="tiny:llama", listen="unix:/a", dtype="float32", threads=1)
    prefill = PrefillConfig(model="tiny:llama", listen="unix:/b", dtype="float32", threads=1)

    one, other = prepare(decode, 700, max_rows=5), prepare(prefill, 900)

    assert one.identity == other.identity
    assert (one.rules, one.threads) == (other.rules, 1)
    assert (one.prefill.max_prompt_tokens, other.prefill.max_prompt_tokens) == (700, 900)


def test_longest_prompt_is_never_longer_than_the_model_s_context() -> None:
    """What the positions of the model were not made for is not promised."""
    config = PrefillConfig(model="tiny:llama", listen="unix:/b", dtype="float32", threads=1)

    ready = prepare(config, 1 << 20)

    assert ready.prefill.max_prompt_tokens == ready.loaded.max_context
