"""Give every linear layer of a model a kernel whose rows do not depend on how many rows run with them.

Theory of operation: a matrix product sums in an order that its library chooses by the shape, so one row of a
batch may round differently from the same row alone. A sequence would then see who shares its batch. For
every distinct shape `stabilise` runs candidates over many row counts and places, and keeps the first whose
rows never differ:

    packed   oneDNN with the weight laid out in advance; faster than plain from two to sixteen rows
    plain    torch's own product

each with a *minimum of rows* (one, or two where a single row takes another kernel), and as a last resort in
*blocks* of a fixed number of rows. The order is fixed and not a race, so that two processes on one host
choose alike. The probe's weight and rows cancel pairwise, so that a result is nothing but the rounding of
its sum: another order shows in almost every element, even in bfloat16, where real numbers would hide it.

Ownership: a packed layer frees its weight. A weight that another module holds too (tied embeddings) stays
with that module. Fingerprints have to be taken before.

Not here: attention (`attention.py`), activations (`activations.py`), which linears run as one (`fused.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.errors import EngineFailed
from common.model.forward.activations import stabilise_activations
from common.model.forward.fused import FusedPart, families

Product = Callable[[Tensor], Tensor]
"""Rows [N, in] to rows [N, out]."""

_LARGE_ROWS = (17, 33, 64, 255, 256, 257)
"""Row counts of a prefill to try as well: odd ones, whole tiles, and just beside them."""

_PACK_ROWS_HINT = 16
"""Rows the packed layout is made for. A constant: the layout decides the order of the sum."""


STABLE_ROWS = 32
"""Decode batches up to this size get the kernels that prefill uses too, so that both services agree."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What a kernel is chosen by."""

    in_features: int
    out_features: int
    dtype: str
    has_bias: bool

    rows_are_few: bool
    """Whether no more rows than the lanes ever run: the output head, which prefill asks for one position."""


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """How a linear layer runs."""

    is_packed: bool

    min_rows: int
    """Fewer rows are padded up to this number."""

    block_rows: int | None
    """Rows of every product, whatever was asked for; None when any number gives the same bits."""

    def __str__(self) -> str:
        rows = f"blocks of {self.block_rows}" if self.block_rows else f"at least {self.min_rows}"
        return f"{'packed' if self.is_packed else 'plain'}, rows {rows}"


@dataclass(frozen=True, slots=True)
class LinearReport:
    """The kernels a model's linear layers run with."""

    kernels: tuple[tuple[LinearShape, LinearKernel], ...]

    @property
    def numerics(self) -> str:
        """Name what decides the bits: the products and fixed blocks; a minimum of rows changes none."""
        return "linears " + ", ".join(sorted({_bits_of(kernel) for _, kernel in self.kernels}))

    @property
    def rows_rule(self) -> str:
        """Say in one line how rows are run, for the capabilities."""
        counts = Counter(str(kernel) for _, kernel in self.kernels)
        return "; ".join(f"{count} shapes {rule}" for rule, count in sorted(counts.items()))


def _bits_of(kernel: LinearKernel) -> str:
    product = "packed" if kernel.is_packed else "plain"
    return f"{product}/{kernel.block_rows}" if kernel.block_rows else product


class StableLinear(nn.Module):
    """A linear layer whose row results do not depend on the number of rows; holds a product, no parameter."""

    def __init__(self, shape: LinearShape, kernel: LinearKernel, product: Product) -> None:
        super().__init__()
        self.in_features = shape.in_features
        self.out_features = shape.out_features
        self.kernel = kernel
        self._product = product
        self._min_rows = kernel.min_rows
        self._block_rows = kernel.block_rows

    def forward(self, x: Tensor) -> Tensor:
        """Return the product for rows in any leading shape."""
        rows = x.numel() // self.in_features
        if self._block_rows is None and rows >= self._min_rows:
            return self._product(x)
        flat = x.reshape(rows, self.in_features)
        padded = self._padded(flat) if self._block_rows is None else self._in_blocks(flat, self._block_rows)
        return padded[:rows].view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return what printing the model shows."""
        return f"{self.in_features}, {self.out_features}, {self.kernel}"

    def _padded(self, flat: Tensor) -> Tensor:
        return self._product(_pad(flat, self._min_rows))

    def _in_blocks(self, flat: Tensor, block_rows: int) -> Tensor:
        padded = _pad(flat, -(-len(flat) // block_rows) * block_rows)
        return torch.cat([self._product(block) for block in padded.split(block_rows)])


def stabilise(model: nn.Module, max_rows: int) -> LinearReport:
    """Make the rows of every linear layer and activation of `model` independent of the batch.

    `max_rows` is the largest decode batch, and the same on both services. Raises EngineFailed when some
    shape has no such kernel; the model may then be half replaced and must not be used.
    """
    if any(isinstance(module, StableLinear | FusedPart) for module in model.modules()):
        raise EngineFailed("the linears of this model are stabilised already")
    head = _output_head(model)
    kernels: dict[LinearShape, LinearKernel] = {}

    def stable(linear: nn.Linear) -> StableLinear:
        shape = _shape(linear, linear is head)
        if shape not in kernels:
            kernels[shape] = choose_kernel(shape, linear.weight.dtype, linear.weight.device, max_rows)
        product = make_product(kernels[shape].is_packed, linear.weight.detach(), _bias(linear))
        return StableLinear(shape, kernels[shape], product)

    for family in families(model):
        family.replace_by(stable(family.merged()))
    for parent, name, linear in list(_linears(model)):
        setattr(parent, name, stable(linear))
    stabilise_activations(model)
    return LinearReport(tuple(kernels.items()))


def choose_kernel(
    shape: LinearShape, dtype: torch.dtype, device: torch.device, max_rows: int
) -> LinearKernel:
    """Return the first kernel whose rows have the same bits in every company.

    Raises EngineFailed when there is none.
    """
    weight, bias, rows = _cancelling_probe(shape, dtype, device, max_rows)
    products = [
        (is_packed, make_product(is_packed, weight, bias))
        for is_packed in (True, False)
        if not is_packed or can_pack(weight)
    ]
    counts = [*range(1, max_rows + 1), *(() if shape.rows_are_few else _LARGE_ROWS)]
    for is_packed, product in products:
        for min_rows in differing_minimum(product, rows, counts):
            return LinearKernel(is_packed, min_rows, None)
    for is_packed, product in products:
        if _is_place_invariant(product, rows, max_rows):
            return LinearKernel(is_packed, max_rows, max_rows)
    raise EngineFailed(f"no product of {shape} gives a row the same bits at every place")


def differing_minimum(product: Product, rows: Tensor, counts: list[int]) -> Iterator[int]:
    """Yield the smallest number of rows from which on a row's bits are always the same: 1, 2 or nothing."""
    expected = product(rows[: max(counts)])
    wrong = {count for count in counts if not _agrees(product, rows, count, expected)}
    if not wrong:
        yield 1
    elif wrong == {1}:
        yield 2


def can_pack(weight: Tensor) -> bool:
    """Tell whether oneDNN can lay this weight out in advance here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    try:
        operators._reorder_linear_weight(torch.zeros_like(weight[:16]), _PACK_ROWS_HINT)
    except RuntimeError:  # float16 without the instructions for it
        return False
    return True


def make_product(is_packed: bool, weight: Tensor, bias: Tensor | None) -> Product:
    """Return the product with this weight [out, in]; a packed one holds a copy of its own."""
    if not is_packed:
        return lambda x: functional.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS_HINT)
    run = torch.ops.mkldnn._linear_pointwise.default
    no_scalars: list[Any] = []
    return lambda x: run(x, packed, bias, "none", no_scalars, "")


def _agrees(product: Product, rows: Tensor, count: int, expected: Tensor) -> bool:
    """Compare `count` rows, starting elsewhere each time so that rows change their place."""
    start = (5 * count) % (len(expected) - count + 1)
    return torch.equal(product(rows[start : start + count]), expected[start : start + count])


def _is_place_invariant(product: Product, rows: Tensor, block_rows: int) -> bool:
    block = rows[:block_rows]
    expected = product(block)
    turns = range(1, block_rows)
    return all(torch.equal(product(block.roll(turn, 0)), expected.roll(turn, 0)) for turn in turns)


def _cancelling_probe(
    shape: LinearShape, dtype: torch.dtype, device: torch.device, max_rows: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return weight, bias and rows whose products cancel pairwise, in shuffled places.

    Every product of the first half has its negative in the second, so that the exact sum is zero (but for an
    odd column) and the result is what rounding left.
    """
    generator = torch.Generator().manual_seed(0)
    half = shape.in_features // 2
    places = torch.randperm(shape.in_features, generator=generator)
    weight = torch.randn(shape.out_features, shape.in_features, generator=generator)
    num_rows = max(max_rows, 0 if shape.rows_are_few else max(_LARGE_ROWS))
    rows = torch.randn(num_rows, shape.in_features, generator=generator)
    weight[:, half : 2 * half] = -weight[:, :half]
    rows[:, half : 2 * half] = rows[:, :half]
    bias = torch.zeros(shape.out_features, dtype=dtype, device=device) if shape.has_bias else None
    return weight[:, places].to(device, dtype), bias, rows[:, places].to(device, dtype)


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child


def _output_head(model: nn.Module) -> nn.Module | None:
    getter: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    return getter() if getter is not None else None


def _shape(linear: nn.Linear, is_head: bool) -> LinearShape:
    return LinearShape(
        in_features=linear.in_features,
        out_features=linear.out_features,
        dtype=str(linear.weight.dtype).removeprefix("torch."),
        has_bias=linear.bias is not None,
        rows_are_few=is_head,
    )


def _bias(linear: nn.Linear) -> Tensor | None:
    bias: Tensor | None = linear.bias
    return None if bias is None else bias.detach()


def _pad(flat: Tensor, num_rows: int) -> Tensor:
    if len(flat) == num_rows:
        return flat
    return torch.cat([flat, flat[:1].expand(num_rows - len(flat), -1)])
