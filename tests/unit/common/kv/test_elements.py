"""Rows of one element type as rows of another; bits are written out, so that no library judges itself."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import EngineFailed
from common.kv.elements import convert, converted
from common.kv.geometry import DType
from common.kv.writer import Rows

BF16, F16, F32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32

BITS = {
    (F32, BF16): [
        (0x3F80_0000, 0x3F80),  # 1 is 1
        (0x3F80_8000, 0x3F80),  # in the middle, the even one is below
        (0x3F81_8000, 0x3F82),  # in the middle, the even one is above
        (0x3F80_8001, 0x3F81),  # just above the middle
        (0xBF80_7FFF, 0xBF80),  # just below the middle, negative
        (0x7F7F_7FFF, 0x7F7F),  # the largest that still fits
        (0x7F80_0000, 0x7F80),  # infinite stays so
        (0x8000_0000, 0x8000),  # minus zero stays so
    ],
    (F32, F16): [
        (0x3F80_0000, 0x3C00),
        (0x3F80_1000, 0x3C00),
        (0x3F80_3000, 0x3C02),
        (0x477F_EFFF, 0x7BFF),  # 65519.996 rounds to the largest, 65504
        (0x3380_0000, 0x0001),  # the smallest one above zero
        (0xFF80_0000, 0xFC00),
    ],
    (BF16, F32): [(0x3F81, 0x3F81_0000), (0xFF80, 0xFF80_0000), (0x0001, 0x0001_0000)],
    (F16, F32): [(0x3C01, 0x3F80_2000), (0x7C00, 0x7F80_0000), (0x0001, 0x3380_0000)],
    (BF16, F16): [(0x3F81, 0x3C08), (0x3380, 0x0001)],
    (F16, BF16): [(0x3C01, 0x3F80), (0x7BFF, 0x4780)],
}
"""Bits before and after, by types."""


def raw(bits: list[int], dtype: DType) -> Rows:
    """Return rows of one token and one head."""
    words = np.array(bits, dtype=np.uint32 if dtype is F32 else np.uint16)
    return words.reshape(1, 1, -1)


def bits_of(rows: Rows | bytes, dtype: DType) -> list[int]:
    """Return the bits of numbers."""
    numbers: NDArray[np.generic] = np.frombuffer(
        rows if isinstance(rows, bytes) else rows.tobytes(), np.uint32 if dtype is F32 else np.uint16
    )
    return [int(number) for number in numbers]


@pytest.mark.parametrize(("source", "target"), BITS)
def test_numbers_go_to_the_nearest_one_ties_to_even(source: DType, target: DType) -> None:
    """What is infinite stays so, and so does the sign of zero."""
    before, after = (list(bits) for bits in zip(*BITS[source, target], strict=True))

    assert bits_of(converted(raw(before, source), source, target), target) == after


@pytest.mark.parametrize(
    ("source", "target", "bits"),
    [(F32, F16, 0x477F_F000), (BF16, F16, 0x4780), (F32, BF16, 0x7F7F_8000), (F32, F16, 0xFF7F_FFFF)],
)
def test_a_finite_number_that_does_not_fit_is_refused(source: DType, target: DType, bits: int) -> None:
    """It would be infinite, and what attends to it no number."""
    with pytest.raises(EngineFailed, match=f"1 finite numbers of {source.value} do not fit {target.value}"):
        converted(raw([0, bits], source), source, target)


@pytest.mark.parametrize("target", [BF16, F16])
def test_what_is_no_number_stays_none(target: DType) -> None:
    """Whoever looks for it finds it where it came from."""
    (bits,) = bits_of(converted(raw([0x7FC0_0000], F32), F32, target), target)
    exponent = 0x7F80 if target is BF16 else 0x7C00

    assert bits & exponent == exponent
    assert bits & ~exponent & 0x7FFF


def test_rows_of_one_type_are_left_alone() -> None:
    """They are not even copied."""
    rows = raw([1, 2, 3], BF16)

    assert converted(rows, BF16, BF16) is rows


def test_words_of_any_size_and_rows_apart_are_read_as_numbers() -> None:
    """An engine hands over views of what it computed: strides between rows, eight bytes a word."""
    numbers = np.arange(48, dtype=np.float32).reshape(4, 3, 4)
    words = numbers.view(np.int64)[::2]

    rows = converted(words, F32, F16)

    assert (rows.shape, rows.itemsize) == ((2, 3, 4), 2)
    assert rows.view(np.float16).tolist() == numbers[::2].tolist()


def test_numbers_are_written_where_they_belong_and_nowhere_else() -> None:
    """Straight into memory, at an offset; bytes beside them stay as they are."""
    memory = bytearray(b"\xee" * 16)

    convert(raw([0x3F80_0000, 0x4000_0000], F32), F32, memory, BF16, offset=6)

    assert bits_of(bytes(memory[6:10]), BF16) == [0x3F80, 0x4000]
    assert memory[:6] + memory[10:] == b"\xee" * 12
