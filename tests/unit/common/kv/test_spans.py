"""What a span is and how its bytes lie."""

from itertools import pairwise

import pytest

from common.kv import spans
from common.kv.geometry import GroupGeometry
from common.kv.ranges import Range
from tests.support.factories import make_geometry, make_span


@pytest.fixture
def group() -> GroupGeometry:
    """A group with rows of 96 bytes: 3 heads of 8 float32."""
    return make_geometry(num_layers=5).groups[0]


@pytest.mark.parametrize(("num_bytes", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_sizes_round_up_to_the_alignment(num_bytes: int, expected: int) -> None:
    """A multiple of 64 stays as it is."""
    assert spans.align_up(num_bytes) == expected


def test_each_part_is_padded_to_64_bytes(group: GroupGeometry) -> None:
    """Keys and values of 5 tokens are 960 bytes; of 1 token 192; of 2 rows of 48 bytes padded."""
    narrow = make_geometry(num_kv_heads=3, head_dim=4).groups[0]

    assert spans.part_stride(group, 5) == 2 * 96 * 5
    assert spans.part_stride(narrow, 1) == 128
    assert spans.span_bytes(narrow, 2, 1) == 256


def test_parts_follow_each_other_by_layer(group: GroupGeometry) -> None:
    """Layer number 2 of the span starts after two whole parts, wherever the span's layers start."""
    assert spans.part_offset(group, 5, 2) == 2 * 960


def test_values_follow_keys_inside_a_part() -> None:
    """The pad lies after the values, never between keys and values."""
    narrow = make_geometry(num_kv_heads=3, head_dim=4).groups[0]

    assert spans.key_range(narrow, 3, 1) == Range(320, 320 + 144)
    assert spans.value_range(narrow, 3, 1) == Range(464, 464 + 144)
    assert spans.part_offset(narrow, 3, 2) == 640


def test_all_ranges_of_a_span_are_disjoint_and_inside(group: GroupGeometry) -> None:
    """No byte of a span belongs to two rows."""
    ranges = [
        layout(group, 7, layer) for layer in range(3) for layout in (spans.key_range, spans.value_range)
    ]

    assert all(before.stop <= after.start for before, after in pairwise(ranges))
    assert ranges[-1].stop <= spans.span_bytes(group, 3, 7)


def test_a_span_knows_the_slab_bytes_it_occupies(group: GroupGeometry) -> None:
    """The extent counts from the start of the slab."""
    span = make_span(group, Range(1, 3), Range(4, 9), offset=8192)

    assert span.extent == Range(8192, 8192 + 2 * 960)
