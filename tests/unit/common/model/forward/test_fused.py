"""Tests of `common/model/forward/fused.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.model.forward.fused import families


class Layer(nn.Module):
    """Two families, and a linear that belongs to none."""

    def __init__(self, up_in: int = 5) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(4, 6), nn.Linear(4, 3), nn.Linear(4, 2)
        self.gate_proj = nn.Linear(5, 7, bias=False)
        self.up_proj = nn.Linear(up_in, 8, bias=False)
        self.o_proj = nn.Linear(6, 4)


class CountingProduct(nn.Module):
    """Counts how often the wide product runs."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Run the wide product."""
        self.num_calls += 1
        result: Tensor = self.inner(x)
        return result


def fused_layer() -> tuple[Layer, CountingProduct, dict[str, nn.Linear]]:
    """Return a layer with q, k and v fused, the product, and the linears they were."""
    layer = Layer()
    originals = {"q_proj": layer.q_proj, "k_proj": layer.k_proj, "v_proj": layer.v_proj}
    family = next(families(layer))
    product = CountingProduct(family.merged())
    family.replace_by(product)
    return layer, product, originals


def test_families_are_linears_of_one_input() -> None:
    """Query, key and value make one family, gate and up another, the output projection none."""
    assert [family.names for family in families(Layer())] == [
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
    ]


def test_linears_stay_apart_when_their_inputs_differ_in_width() -> None:
    """A family whose members cannot read one input is none."""
    assert [family.names for family in families(Layer(up_in=6))] == [("q_proj", "k_proj", "v_proj")]


def test_product_runs_once_when_the_parts_are_asked_in_turn() -> None:
    """Three parts of one input cost one product, and each is what its linear gave."""
    layer, product, originals = fused_layer()
    x = torch.randn(2, 3, 4)

    parts = {name: getattr(layer, name)(x) for name in originals}

    assert product.num_calls == 1
    for name, linear in originals.items():
        torch.testing.assert_close(parts[name], linear(x))


def test_part_computes_again_when_another_input_came_between() -> None:
    """A part never answers for an input that is not the one it was asked with."""
    layer, product, originals = fused_layer()
    mine, theirs = torch.randn(2, 4), torch.randn(2, 4)

    layer.q_proj(mine)
    layer.q_proj(theirs)
    value = layer.v_proj(mine)

    torch.testing.assert_close(value, originals["v_proj"](mine))
    assert product.num_calls == 3


def test_nothing_is_kept_when_the_last_part_was_taken() -> None:
    """The same tensor, changed in place for the next step, is computed anew."""
    layer, product, originals = fused_layer()
    x = torch.randn(2, 4)
    for name in originals:
        getattr(layer, name)(x)

    x.add_(1)

    torch.testing.assert_close(layer.q_proj(x), originals["q_proj"](x))
    assert product.num_calls == 2
