"""Tests of kvspan_openvino/choices.py."""

from __future__ import annotations

import pytest
from kvspan_openvino.choices import Choices, read_choices, share_out

from common.engine.options import Options
from common.errors import ConfigError
from common.kv.ranges import Range


def test_every_option_has_a_default() -> None:
    """Nothing has to be chosen."""
    assert read_choices(Options("engine_option", ())) == Choices((256, 1024), 3, "CPU", "f32")


def test_every_option_is_read() -> None:
    """A device is passed on as it was written."""
    given = ("widths=128,512", "parts=5", "device=GPU.1", "precision=bf16")

    assert read_choices(Options("engine_option", given)) == Choices((128, 512), 5, "GPU.1", "bf16")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("widths=512,128", "must ascend"),
        ("widths=", "at least one width"),
        ("parts=0", r"within \[1, 64\]"),
        ("precision=int8", "must be one of f32, bf16, f16"),
        ("streams=2", "no such option; there are: widths, parts, device, precision"),
    ],
)
def test_an_option_that_is_wrong_is_refused_by_name(given: str, words: str) -> None:
    """The operator reads which one it is and what would do."""
    with pytest.raises(ConfigError, match=words) as refused:
        read_choices(Options("engine_option", (given,)))

    assert given in str(refused.value)


@pytest.mark.parametrize(
    ("num_layers", "parts", "stops"),
    [(30, 3, [10, 20, 30]), (5, 2, [2, 5]), (5, 5, [1, 2, 3, 4, 5]), (7, 1, [7])],
)
def test_layers_are_shared_out_in_order(num_layers: int, parts: int, stops: list[int]) -> None:
    """Every layer is in one part, and no part is empty."""
    found = share_out(num_layers, parts)

    assert [part.stop for part in found] == stops
    assert found == tuple(Range(start, stop) for start, stop in zip([0, *stops], stops, strict=False))
