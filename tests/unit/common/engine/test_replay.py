"""KV of a made-up model: the same bytes on both sides, different in every row."""

from __future__ import annotations

import numpy as np
import pytest

from common.engine.options import Options
from common.engine.replay import Pattern, next_token, read_shape
from common.errors import ConfigError
from common.kv.ranges import Range

OPTIONS = ["layers=3", "kv_heads=2", "head_dim=8", "dtype=float32", "vocab=11"]


def test_the_shape_is_what_was_asked_for() -> None:
    """And two services that were told the same are the same model."""
    one, other = (read_shape(Options("engine_option", OPTIONS)) for _ in range(2))

    assert one == other
    assert (len(one.geometry.layers), one.geometry.vocab_size, one.geometry.token_bytes) == (
        3,
        11,
        3 * 2 * 64,
    )
    assert read_shape(Options("engine_option", [*OPTIONS, "window=5"])).fingerprint != one.fingerprint


def test_every_row_is_different_and_does_not_depend_on_the_stretch() -> None:
    """Of all layers, keys and values, and positions."""
    pattern = Pattern(read_shape(Options("engine_option", OPTIONS)).geometry.groups[0])

    rows = {
        (layer, kind, position): pattern.rows(layer, kind, Range(position, position + 1)).tobytes()
        for layer in range(3)
        for kind in (0, 1)
        for position in range(40)
    }

    assert len(set(rows.values())) == len(rows)
    whole = pattern.rows(2, 1, Range(7, 30))
    assert whole.shape == (23, 2, 4)
    assert whole.tobytes() == b"".join(rows[2, 1, position] for position in range(7, 30))


def test_rows_that_are_no_whole_words_are_refused() -> None:
    """By the option that helps."""
    with pytest.raises(ConfigError, match="head_dim=3: must have a multiple of 8 bytes"):
        read_shape(Options("engine_option", ["head_dim=3", "dtype=bfloat16"]))


def test_the_next_token_is_the_number_above() -> None:
    """Around the end of the vocabulary."""
    assert [int(np.argmax(next_token([1, token], 11))) for token in (4, 10)] == [5, 0]
