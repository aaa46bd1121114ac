"""Tests of `common/model/torch_engine.py`."""

from __future__ import annotations

from common.engine.prefill import PrefillEngine
from common.model.forward.prefill import ChunkedPrefill
from common.model.torch_engine import TorchEngine
from tests.support.fakes import make_engine_identity
from tests.support.models import RecordingWriter, dense, make_model, make_prompt, never


def test_engine_is_the_chunked_prefill_with_a_description() -> None:
    """The engine writes and returns exactly what the local route of decode would."""
    tiny = make_model()
    prefill = ChunkedPrefill(tiny.model, tiny.geometry, 32, 100)
    engine: PrefillEngine = TorchEngine(
        prefill, make_engine_identity(tiny.geometry), ("dtype float32", "chunk 32")
    )
    told, expected = RecordingWriter(), RecordingWriter()
    prompt = make_prompt(50)

    wanted = dense(tiny.geometry, 50, 32)

    logits = engine.prefill(prompt, wanted, told, never)

    assert logits.tobytes() == prefill.prefill(prompt, wanted, expected, never).tobytes()
    assert told.writes == expected.writes
    description = engine.describe()
    assert (description.name, description.chunk_tokens, description.max_prompt_tokens) == ("torch", 32, 100)
    assert description.numerics == ("dtype float32", "chunk 32")
