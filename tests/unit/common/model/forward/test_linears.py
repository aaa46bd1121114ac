"""Tests of `common/model/forward/linears.py`."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.errors import EngineFailed
from common.model.folder.source import TinyFamily
from common.model.forward.fused import FusedPart
from common.model.forward.linears import (
    LinearKernel,
    LinearShape,
    Product,
    StableLinear,
    can_pack,
    choose_kernel,
    differing_minimum,
    make_product,
    stabilise,
)
from common.model.tiny import make_tiny, tiny_config

CPU = torch.device("cpu")


def make_shape(in_features: int = 48, out_features: int = 33, *, has_bias: bool = False) -> LinearShape:
    """Return a shape whose sizes fit no tile."""
    return LinearShape(in_features, out_features, "float32", has_bias, rows_are_few=False)


def odd_row_counts_differ(rows: Tensor) -> Tensor:
    """Be a product whose rows change with the number of rows beside them."""
    return rows + len(rows) % 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_have_the_same_bits_in_any_company(dtype: torch.dtype, has_bias: bool) -> None:
    """A row of a stable linear is the same alone, among few, among many, and at any place."""
    torch.manual_seed(1)
    linear = nn.Linear(48, 33, bias=has_bias).to(dtype).requires_grad_(False)
    holder = nn.Sequential(linear)
    stabilise(holder, max_rows=8)
    rows = torch.randn(40, 48).to(dtype)

    together = holder(rows)

    for count in (1, 2, 3, 7, 8, 17):
        assert torch.equal(holder(rows[5 : 5 + count]), together[5 : 5 + count])


def test_result_is_the_linears_own_when_stabilised() -> None:
    """Another kernel changes the rounding and nothing else."""
    torch.manual_seed(2)
    linear = nn.Linear(48, 33).requires_grad_(False)
    rows = torch.randn(2, 3, 48)
    expected = linear(rows)
    holder = nn.Sequential(linear)

    stabilise(holder, max_rows=4)

    torch.testing.assert_close(holder(rows), expected)


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        (LinearKernel(False, 1, None), [3, 5]),
        (LinearKernel(False, 4, None), [4, 5]),
        (LinearKernel(False, 4, 4), [4, 4, 4]),
    ],
)
def test_product_sees_the_rows_its_kernel_says(kernel: LinearKernel, sizes: list[int]) -> None:
    """Rows are padded up to the minimum, or cut into padded blocks, and the padding is cut off again."""
    torch.manual_seed(3)
    weight, seen = torch.randn(33, 48), []

    def product(rows: Tensor) -> Tensor:
        seen.append(len(rows))
        return functional.linear(rows, weight)

    linear = StableLinear(make_shape(), kernel, product)
    for count in (3, 5):
        rows = torch.randn(count, 48)
        torch.testing.assert_close(linear(rows), functional.linear(rows, weight))

    assert seen == sizes


@pytest.mark.parametrize(
    ("product", "minimum"),
    [
        (lambda rows: rows * 2, [1]),
        (lambda rows: rows + (len(rows) == 1), [2]),
        (odd_row_counts_differ, []),
    ],
)
def test_minimum_is_found_where_only_single_rows_differ(product: Product, minimum: list[int]) -> None:
    """A product that differs for one row needs two; one that differs elsewhere has no minimum."""
    rows = torch.randn(9, 4)

    assert list(differing_minimum(product, rows, [1, 2, 3, 8])) == minimum


def test_blocks_are_the_last_resort_when_every_row_count_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that depends on the number of rows runs with one number of rows only."""
    monkeypatch.setattr("common.model.forward.linears.can_pack", lambda weight: False)
    monkeypatch.setattr("common.model.forward.linears.make_product", lambda *_: odd_row_counts_differ)

    kernel = choose_kernel(make_shape(4, 4), torch.float32, CPU, max_rows=6)

    assert kernel == LinearKernel(is_packed=False, min_rows=6, block_rows=6)


def test_choice_fails_when_even_the_place_in_a_block_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product without any rule that makes rows independent is refused."""
    monkeypatch.setattr(
        "common.model.forward.linears.make_product",
        lambda *_: lambda rows: rows + torch.arange(len(rows))[:, None],
    )

    with pytest.raises(EngineFailed, match="same bits at every place"):
        choose_kernel(make_shape(4, 4), torch.float32, CPU, max_rows=3)


def test_choice_falls_back_to_plain_when_onednn_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without oneDNN the plain product runs, by the same rule."""
    monkeypatch.setattr("common.model.forward.linears.can_pack", lambda weight: False)
    holder = nn.Sequential(nn.Linear(48, 33).requires_grad_(False))

    report = stabilise(holder, max_rows=4)

    assert {kernel.is_packed for _, kernel in report.kernels} == {False}


def test_packing_gives_the_same_product() -> None:
    """The layout in advance changes no result beyond rounding."""
    torch.manual_seed(4)
    weight, bias, rows = torch.randn(33, 48), torch.randn(33), torch.randn(5, 48)
    if not can_pack(weight):
        pytest.skip("oneDNN packs no float32 here")

    packed = make_product(True, weight, bias)(rows)

    torch.testing.assert_close(packed, functional.linear(rows, weight, bias))


def test_model_gives_the_same_logits_after_it_is_stabilised() -> None:
    """Every linear is replaced, those of one input by one product, and the model is the same function."""
    model = make_tiny(tiny_config(TinyFamily.QWEN3), 3, torch.float32)
    tokens = torch.tensor([[5, 7, 11, 13]])
    expected = model(tokens).logits

    stabilise(model, max_rows=4)

    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    kinds = Counter(type(module) for module in model.modules())
    assert (kinds[FusedPart], kinds[StableLinear]) == (4 * (3 + 2), 4 * 2 + 1)


def test_stabilising_fails_when_done_already() -> None:
    """A second call would measure layers that are no linears any more."""
    holder = nn.Sequential(nn.Linear(4, 3).requires_grad_(False))
    stabilise(holder, max_rows=2)

    with pytest.raises(EngineFailed, match="already"):
        stabilise(holder, max_rows=2)


def test_report_names_product_and_rows() -> None:
    """The capabilities say how rows run; the numerics only what decides bits."""
    holder = nn.Sequential(nn.Linear(48, 33).requires_grad_(False))

    report = stabilise(holder, max_rows=4)

    assert report.numerics in ("linears packed", "linears plain")
    assert report.rows_rule.startswith("1 shapes ")
    assert "rows at least" in report.rows_rule
