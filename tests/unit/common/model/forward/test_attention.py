"""Tests of `common/model/forward/attention.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.errors import EngineFailed
from common.model.forward.attention import attend, attend_chunk, attend_each, chunk_mask

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 3, 8
SCALING = 0.3


class RecordedKV:
    """An `AttendedKV` that returns its query, scaled."""

    window = 5

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        """Return what was asked for."""
        return query * (scaling or 1)


def plain_attention(query_QTD: Tensor, key_LHD: Tensor, value_LHD: Tensor, mask_TL: Tensor) -> Tensor:
    """Return [T, Q, D] by the textbook: repeated heads, softmax over what is visible."""
    repeat = query_QTD.shape[0] // key_LHD.shape[1]
    keys = key_LHD.transpose(0, 1).repeat_interleave(repeat, 0)
    values = value_LHD.transpose(0, 1).repeat_interleave(repeat, 0)
    scores = (query_QTD @ keys.transpose(1, 2) * SCALING).masked_fill(~mask_TL, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1)


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "window"),
    [(4, 4, None), (4, 9, None), (4, 4, 2), (4, 9, 3), (1, 9, None), (5, 5, 5), (1, 1, 1)],
)
def test_chunk_sees_its_past_and_its_window(num_queries: int, num_keys: int, window: int | None) -> None:
    """A query at position p sees the keys at p - window + 1 to p."""
    torch.manual_seed(1)
    query = torch.randn(NUM_HEADS, num_queries, HEAD_DIM)
    key, value = torch.randn(2, num_keys, NUM_KV_HEADS, HEAD_DIM)
    positions = torch.arange(num_keys - num_queries, num_keys)[:, None]
    distance = positions - torch.arange(num_keys)
    visible = (distance >= 0) & (distance < (window or num_keys))

    mask = chunk_mask(num_queries, num_keys, window, torch.device("cpu"))
    output = attend_chunk(query[None], key, value, mask, SCALING)

    torch.testing.assert_close(output[0], plain_attention(query, key, value, visible))


def test_mask_is_none_when_attention_is_plainly_causal() -> None:
    """The causal kernel runs for a first chunk that fits its window."""
    device = torch.device("cpu")

    assert chunk_mask(4, 4, None, device) is None
    assert chunk_mask(4, 4, 4, device) is None
    assert chunk_mask(4, 4, 3, device) is not None
    assert chunk_mask(4, 5, None, device) is not None


def test_each_sequence_attends_to_its_own_keys() -> None:
    """Sequences of different lengths in one batch do not see each other."""
    torch.manual_seed(2)
    query = torch.randn(2, NUM_HEADS, 1, HEAD_DIM)
    keys = [torch.randn(length, NUM_KV_HEADS, HEAD_DIM) for length in (3, 7)]
    values = [torch.randn(length, NUM_KV_HEADS, HEAD_DIM) for length in (3, 7)]

    output = attend_each(
        query, [k.transpose(0, 1)[None] for k in keys], [v.transpose(0, 1)[None] for v in values], SCALING
    )

    for row, key, value in zip(range(2), keys, values, strict=True):
        everything = torch.ones(1, len(key), dtype=torch.bool)
        torch.testing.assert_close(output[row], plain_attention(query[row], key, value, everything))


@pytest.mark.parametrize(
    "asked",
    [
        {"attention_mask": torch.ones(1)},
        {"dropout": 0.1},
        {"sliding_window": 4},
        {"softcap": 30.0},
        {"s_aux": torch.ones(2)},
        {"position_bias": torch.ones(2)},
        {"output_attentions": True},
        {"is_causal": False},
        {"some_new_argument": 1},
    ],
)
def test_attention_refuses_what_it_does_not_know(asked: dict[str, Any]) -> None:
    """An argument that could change the result is an error, never ignored."""
    kv = RecordedKV()
    arguments = {"attention_mask": None, **asked}

    with pytest.raises(EngineFailed):
        attend(nn.Identity(), torch.ones(1), kv, kv, **arguments)


def test_attention_passes_when_arguments_change_nothing() -> None:
    """Positions, flags that are off and the geometry's own window are accepted."""
    kv = RecordedKV()

    output, weights = attend(
        nn.Identity(),
        torch.ones(1),
        kv,
        kv,
        None,
        scaling=SCALING,
        sliding_window=5,
        softcap=None,
        output_attentions=False,
        position_ids=torch.ones(1),
        is_causal=True,
    )

    assert weights is None
    assert output.item() == pytest.approx(SCALING)


def test_attention_refuses_tensors() -> None:
    """A model that attends to fresh keys instead of the cache's would lose what lies in pages."""
    tensor = torch.ones(1)

    with pytest.raises(EngineFailed, match="what its cache returned"):
        attend(nn.Identity(), tensor, tensor, tensor, None)  # type: ignore[arg-type]


def test_head_groups_share_keys_as_torch_does() -> None:
    """Query head q reads KV head q // (Q / H), as in torch's own grouped attention."""
    torch.manual_seed(3)
    query = torch.randn(1, NUM_HEADS, 1, HEAD_DIM)
    key, value = torch.randn(2, 1, NUM_KV_HEADS, 9, HEAD_DIM)
    expected = functional.scaled_dot_product_attention(query, key, value, scale=SCALING, enable_gqa=True)

    output = attend_each(query, [key], [value], SCALING)

    torch.testing.assert_close(output, expected.transpose(1, 2))
