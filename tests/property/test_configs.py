"""A config.json with any value in any place is refused, or means what its fields say, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.errors import ConfigError
from common.model.folder.source import TinyFamily
from common.model.loader import LoadedModel, load_model
from common.model.progress import shown_progress
from common.model.tiny import make_byte_tokenizer, make_tiny, tiny_config
from tests.support.models import torch_threads

KEYS = (
    *tiny_config(TinyFamily.GEMMA3).to_dict(),
    "rope_scaling", "rope_theta", "partial_rotary_factor", "is_causal", "is_decoder", "per_layer_config",
    "quantization_config", "text_config", "num_labels", "attention_chunk_size", "torch_dtype", "auto_map",
    "attn_implementation", "kv_lora_rank", "original_max_position_embeddings", "a_note",
)  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 32, 10**9, 10**12, 0.5, -0.5, 1e300, float("nan"), float("inf"),
    "x", "", [], [1], {}, {"a": 1}, ["full_attention"], ["full_attention"] * 6,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Odd:
    """A folder whose config every example writes anew, what was in it, and what it was loaded as."""

    folder: Path
    written: dict[str, Any]
    loaded: LoadedModel
    logits: Tensor


def answer(loaded: LoadedModel) -> Tensor:
    """Return the logits of a few tokens."""
    with torch.inference_mode():
        logits: Tensor = loaded.model(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits
    return logits


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Odd]:
    """Return the folder of a tiny model with windows."""
    folder = tmp_path_factory.mktemp("odd")
    with shown_progress(False):
        make_tiny(tiny_config(TinyFamily.GEMMA3), 5, torch.float32).save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    # A team of two that waits for a busy core takes ten times as long.
    with torch_threads(1):
        loaded = load_model(str(folder), "float32", progress=False)
        yield Odd(folder, written, loaded, answer(loaded))


@settings(max_examples=80, deadline=None)
@given(key=st.sampled_from(KEYS), value=st.sampled_from(VALUES))
def test_any_value_of_a_config_is_refused_or_told_in_the_fields(odd: Odd, key: str, value: Any) -> None:
    """No traceback and no silent change: whoever has the same fields has the same logits."""
    (odd.folder / "config.json").write_text(json.dumps({**odd.written, key: value}))

    try:
        loaded = load_model(str(odd.folder), "float32", progress=False)
    except ConfigError:
        return
    if loaded.config_fields == odd.loaded.config_fields:
        assert torch.equal(answer(loaded), odd.logits)
