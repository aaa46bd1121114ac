"""Run linear layers that read the same rows as one product.

Theory of operation: query, key and value of a layer, and gate and up of its MLP, are products of one input.
One wide product reads as many weights in fewer calls. The first part that is asked for computes all of
them; the others find theirs by the identity of the input tensor, which is kept until the last part has
taken its own. A part asked with another input simply computes again, so that no order of calls, and no
second thread in the same model, can see a wrong result.

Not here: the product itself (`linears.py`).

Shapes: N rows, the parts of the output one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under which transformers' models keep linears of one input, in the order they are called."""


@dataclass(frozen=True, slots=True)
class Family:
    """Linear layers of one module that can be one product."""

    parent: nn.Module
    names: tuple[str, ...]
    members: tuple[nn.Linear, ...]

    def merged(self) -> nn.Linear:
        """Return one linear layer with the outputs of all; the weights are copied."""
        first = self.members[0]
        merged = nn.Linear(1, 1, bias=first.bias is not None, device="meta")
        merged.weight = nn.Parameter(torch.cat([one.weight for one in self.members]), requires_grad=False)
        merged.in_features, merged.out_features = first.in_features, len(merged.weight)
        if first.bias is not None:
            merged.bias = nn.Parameter(torch.cat([one.bias for one in self.members]), requires_grad=False)
        return merged

    def replace_by(self, product: nn.Module) -> None:
        """Put parts of `product`, which computes `merged`, in the place of the members."""
        shared = _SharedProduct(product, [one.out_features for one in self.members])
        for index, name in enumerate(self.names):
            setattr(self.parent, name, FusedPart(shared, index))


class FusedPart(nn.Module):
    """One linear layer's outputs out of a wide product."""

    def __init__(self, shared: _SharedProduct, index: int) -> None:
        super().__init__()
        # In a tuple: the product is not this part's alone, so it is not registered as a child.
        self._shared = (shared,)
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        """Return a view [..., out] of the wide product of `x`."""
        return self._shared[0].part(x, self._index)


class _SharedProduct:
    """Computes the parts of one input together and keeps them until all are taken."""

    def __init__(self, product: nn.Module, sizes: list[int]) -> None:
        self._product = product
        self._sizes = sizes
        # Invariant: None, or an input and its parts; one assignment, so that a thread sees both or neither.
        self._kept: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def part(self, x: Tensor, index: int) -> Tensor:
        kept = self._kept
        if kept is None or kept[0] is not x:
            kept = x, self._product(x).split(self._sizes, dim=-1)
        self._kept = None if index == len(self._sizes) - 1 else kept
        return kept[1][index]


def families(model: nn.Module) -> Iterator[Family]:
    """Yield the linears of `model` that read the same input."""
    for parent in list(model.modules()):
        for names in _FAMILIES:
            members = [getattr(parent, name, None) for name in names]
            linears = tuple(one for one in members if type(one) is nn.Linear)
            if len(linears) == len(names) and _fit(linears):
                yield Family(parent, names, linears)


def _fit(members: tuple[nn.Linear, ...]) -> bool:
    kinds = {(one.in_features, one.weight.dtype, one.weight.device, one.bias is None) for one in members}
    return len(kinds) == 1
