"""Both services prepare a model in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.model.loader import load_model
from common.model.prepare import prepare
from common.model.tiny import make_byte_tokenizer
from decode_service.config import DecodeConfig
from prefill_service.config import PrefillConfig


def test_both_services_are_the_same_towards_each_other() -> None:
    """One model, one grid: identities fit, whatever batch or longest prompt each is prepared for."""
    decode = DecodeConfig(model="tiny:llama", listen="unix:/a", dtype="float32", threads=1)
    prefill = PrefillConfig(model="tiny:llama", listen="unix:/b", dtype="float32", threads=1)

    one, other = prepare(decode, 700, max_rows=5), prepare(prefill, 900)

    assert one.engine.identity() == other.engine.identity()
    assert (one.engine.describe().numerics, one.threads) == (other.engine.describe().numerics, 1)
    assert [ready.engine.describe().max_prompt_tokens for ready in (one, other)] == [700, 900]


def test_notes_about_the_model_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line each, on both sides; a service that says nothing obeys everything."""
    load_model("tiny:llama", "float32", progress=False).model.save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"top_k": 20, "eos_token_id": 9}')

    prepare(PrefillConfig(model=str(tmp_path), listen="unix:/b", dtype="float32", threads=1), 900)

    (record,) = (record for record in caplog.records if record.message == "model.noted")
    assert record.__dict__["fields"]["note"].endswith(": top_k=20")


def test_longest_prompt_is_never_longer_than_the_model_s_context() -> None:
    """What the positions of the model were not made for is not promised."""
    config = PrefillConfig(model="tiny:llama", listen="unix:/b", dtype="float32", threads=1)

    ready = prepare(config, 1 << 20)

    assert ready.engine.describe().max_prompt_tokens == ready.loaded.max_context
