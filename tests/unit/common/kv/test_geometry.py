"""The shape of a model's KV cache."""

import pytest

from common.kv.geometry import DType, KVGeometry, LayerGeometry
from common.kv.ranges import Range
from tests.support.factories import make_geometry, make_hybrid_geometry


def test_layers_form_groups_when_shape_and_window_agree() -> None:
    """Groups come in order of first appearance and keep the model's layer numbers."""
    groups = make_hybrid_geometry(windows=(6, None, 6, 6, None)).groups

    assert [group.layer_indices for group in groups] == [(0, 2, 3), (1, 4)]
    assert [group.window for group in groups] == [6, None]
    assert [group.group_index for group in groups] == [0, 1]


@pytest.mark.parametrize(
    "other",
    [
        LayerGeometry(1, 5, 8, DType.FLOAT32, 6),
        LayerGeometry(1, 3, 16, DType.FLOAT32, 6),
        LayerGeometry(1, 3, 8, DType.FLOAT16, 6),
        LayerGeometry(1, 3, 8, DType.FLOAT32, 7),
    ],
)
def test_a_layer_gets_its_own_group_when_one_field_differs(other: LayerGeometry) -> None:
    """Heads, head size, dtype and window each separate groups."""
    geometry = KVGeometry((LayerGeometry(0, 3, 8, DType.FLOAT32, 6), other), 11)

    assert len(geometry.groups) == 2


def test_layers_that_own_no_kv_are_not_counted() -> None:
    """A model layer that reuses another's KV is absent and costs nothing."""
    shape = (3, 8, DType.BFLOAT16, None)
    geometry = KVGeometry((LayerGeometry(0, *shape), LayerGeometry(4, *shape)), 11)

    assert geometry.groups[0].num_layers == 2
    assert geometry.token_bytes == 2 * (2 * 3 * 8 * 2)


def test_bytes_of_a_token_are_summed_over_groups_with_different_head_sizes() -> None:
    """Each group has its own stride."""
    geometry = make_hybrid_geometry(windows=(6, None, 6), num_kv_heads=3, head_dim=8, full_head_dim=16)

    assert [group.row_bytes for group in geometry.groups] == [96, 192]
    assert geometry.token_bytes == 2 * 96 * 2 + 2 * 192


@pytest.mark.parametrize(
    ("context_len", "expected"),
    [(0, Range(0, 0)), (5, Range(0, 5)), (6, Range(1, 6)), (7, Range(2, 7)), (31, Range(26, 31))],
)
def test_a_window_shows_one_position_less_than_its_size(context_len: int, expected: Range) -> None:
    """The window of 6 counts the query itself, so 5 earlier positions are visible."""
    assert make_geometry(window=6).groups[0].visible(context_len) == expected


def test_a_window_of_one_shows_nothing_before_the_query() -> None:
    """With a window of 1 nothing has to be transferred."""
    assert len(make_geometry(window=1).groups[0].visible(9)) == 0


def test_full_attention_shows_everything() -> None:
    """Without a window every earlier position is visible."""
    assert make_geometry().groups[0].visible(9) == Range(0, 9)


@pytest.mark.parametrize(
    ("first_token", "expected"),
    [
        (0, (Range(12, 17), Range(0, 17))),
        (8, (Range(12, 17), Range(8, 17))),
        (16, (Range(16, 17), Range(16, 17))),
    ],
)
def test_required_positions_start_at_the_later_of_window_and_first_token(
    first_token: int, expected: tuple[Range, ...]
) -> None:
    """What is held already and what nobody can see any more is not carried."""
    geometry = make_hybrid_geometry(windows=(6, None))

    assert geometry.required(first_token, 17) == expected


def test_nothing_is_required_when_everything_is_held() -> None:
    """A transfer from the end of the prompt carries nothing in any group."""
    assert not any(map(len, make_hybrid_geometry().required(17, 17)))


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ((), "at least one"),
        (
            (LayerGeometry(2, 3, 8, DType.FLOAT32, None), LayerGeometry(2, 3, 8, DType.FLOAT32, None)),
            "ascend",
        ),
        (
            (LayerGeometry(5, 3, 8, DType.FLOAT32, None), LayerGeometry(2, 3, 8, DType.FLOAT32, None)),
            "ascend",
        ),
    ],
)
def test_a_geometry_is_refused_when_it_makes_no_sense(
    layers: tuple[LayerGeometry, ...], problem: str
) -> None:
    """Layers exist and ascend without repeats."""
    with pytest.raises(ValueError, match=problem):
        KVGeometry(layers, 11)
