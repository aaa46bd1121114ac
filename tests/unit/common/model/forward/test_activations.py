"""Activations whose rows have the same bits in every company."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from common.model.forward.activations import StableActivation, stabilise_activations

NUM_ROWS = 9


class Gated(nn.Module):
    """A module with an activation and something that is none."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.act_fn = ACT2FN[name]
        self.proj = nn.Linear(3, 2)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [12, 64, 80, 96, 112])
def test_a_row_has_the_same_bits_alone_and_in_company(name: str, dtype: torch.dtype, width: int) -> None:
    """A row of any width activates to the same bits alone, in any company and at any place."""
    model = Gated(name)
    rows = (3 * torch.randn(NUM_ROWS, width, generator=torch.Generator().manual_seed(5))).to(dtype)

    stabilise_activations(model)

    together = model.act_fn(rows)
    for first in range(NUM_ROWS):
        for stop in range(first + 1, NUM_ROWS + 1):
            assert torch.equal(model.act_fn(rows[first:stop]), together[first:stop])


def test_a_stable_activation_computes_what_it_wraps() -> None:
    """Padding changes nothing but the last bits, and the shape comes back."""
    inner = ACT2FN["silu"]
    x = torch.linspace(-4, 4, 2 * 3 * 7).reshape(2, 3, 7)

    result = StableActivation(inner)(x)

    assert result.shape == x.shape
    assert torch.allclose(result, inner(x), rtol=0, atol=1e-6)


def test_every_activation_is_wrapped_once_however_often_it_is_asked_for() -> None:
    """Wrapping twice is wrapping once, and nothing but activations is wrapped."""
    model = nn.ModuleList([Gated("silu"), Gated("gelu")])

    counts = stabilise_activations(model), stabilise_activations(model)

    assert counts == (2, 2)
    assert not isinstance(model[0].act_fn.inner, StableActivation)
    assert isinstance(model[0].proj, nn.Linear)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_a_row_has_the_same_bits_however_many_threads_share_a_large_call(name: str, num_threads: int) -> None:
    """Where torch splits a call among threads depends on its size; rows must not."""
    rows = torch.randn(100, 1600, generator=torch.Generator().manual_seed(7))
    activation = StableActivation(ACT2FN[name])
    threads_before = torch.get_num_threads()

    try:
        torch.set_num_threads(num_threads)
        together = activation(rows)
        alone = [activation(rows[:count]) for count in (1, 5, 16, 22, 32, 99)]
    finally:
        torch.set_num_threads(threads_before)

    assert all(torch.equal(part, together[: len(part)]) for part in alone)
