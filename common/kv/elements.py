"""Keys and values of one element type as those of another, in the one copy that they make anyway.

Theory of operation: an engine may compute in another type than decode stores. Rows are raw bytes everywhere
else; here they are looked at as numbers, and copied as numbers: to the nearest one that the target has, ties
to even. What is infinite or no number stays so. A finite number that the target would make infinite is
refused: attention over it would be no number any more, far from where it came from.

Not here: which type a session has (decode's: `common/session/negotiation.py`).

Shapes: T tokens, H KV heads, D head size.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from common.errors import EngineFailed
from common.kv.geometry import DType
from common.kv.writer import Rows

NUMPY_TYPES: dict[DType, np.dtype[np.generic]] = {
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.FLOAT16: np.dtype(np.float16),
    DType.FLOAT32: np.dtype(np.float32),
}

_INFINITE = {DType.BFLOAT16: 0x7F80, DType.FLOAT16: 0x7C00}
"""Bits of an infinite number without its sign, of the types that have fewer numbers than another one."""


def as_elements(rows: Rows, dtype: DType) -> NDArray[np.generic]:
    """Return raw rows as numbers [T, H, D]: a view."""
    return rows.view(NUMPY_TYPES[dtype])


def convert(
    rows: Rows, source: DType, memory: memoryview | bytearray, target: DType, offset: int = 0
) -> None:
    """Write rows of type `source` into memory, from `offset` on, as numbers of type `target`.

    Raises: `EngineFailed` when a finite number does not fit; the memory is undefined then.
    """
    numbers = as_elements(rows, source)
    flat = np.frombuffer(memory, dtype=NUMPY_TYPES[target], count=numbers.size, offset=offset)
    _copy(numbers, flat.reshape(numbers.shape), source, target)


def converted(rows: Rows, source: DType, target: DType) -> Rows:
    """Return rows of type `source` as raw rows of type `target`; the same object when that is one type.

    Raises: `EngineFailed` when a finite number does not fit.
    """
    if source is target:
        return rows
    numbers = as_elements(rows, source)
    copy = np.empty(numbers.shape, dtype=NUMPY_TYPES[target])
    _copy(numbers, copy, source, target)
    return copy.view(np.uint32 if target.itemsize == np.uint32().itemsize else np.uint16)


def _copy(numbers: NDArray[np.generic], out: NDArray[np.generic], source: DType, target: DType) -> None:
    # What overflows is looked for below; numpy would only warn, and not for every pair of types.
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = numbers
    infinite = _INFINITE.get(target)
    # Bits are compared since that costs a tenth of the copy; only where one is infinite, what it was before.
    if infinite is not None and ((out.view(np.uint16) & 0x7FFF) == infinite).any():
        grew = np.isinf(out) & np.isfinite(numbers)
        if grew.any():
            problem = f"{int(grew.sum())} finite numbers of {source.value} do not fit {target.value}"
            raise EngineFailed(problem)
