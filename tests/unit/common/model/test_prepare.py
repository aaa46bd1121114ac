"""Both services prepare a model in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.model.loader import load_model
from common.model.prepare import prepare
from common.model.tiny import make_byte_tokenizer
from tests.support.setups import make_setup


def test_both_services_are_the_same_towards_each_other() -> None:
    """One model, one grid: identities fit, whatever batch or longest prompt each is prepared for."""
    one, other = prepare(make_setup(max_prompt_tokens=700), max_rows=5), prepare(make_setup())

    assert one.engine.identity() == other.engine.identity()
    assert one.engine.describe().numerics == other.engine.describe().numerics
    assert [ready.engine.describe().max_prompt_tokens for ready in (one, other)] == [700, 900]


def test_notes_about_the_model_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line each, on both sides; a service that says nothing obeys everything."""
    load_model("tiny:llama", "float32", progress=False).model.save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"top_k": 20, "eos_token_id": 9}')

    prepare(make_setup(str(tmp_path)))

    (record,) = (record for record in caplog.records if record.message == "model.noted")
    assert record.__dict__["fields"]["note"].endswith(": top_k=20")


def test_longest_prompt_is_never_longer_than_the_model_s_context() -> None:
    """What the positions of the model were not made for is not promised."""
    ready = prepare(make_setup(max_prompt_tokens=1 << 20))

    assert ready.engine.describe().max_prompt_tokens == ready.loaded.max_context
