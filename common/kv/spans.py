"""What a span is and how its bytes lie.

Theory of operation: a span is the KV of consecutive layers of one group for consecutive positions of one
transfer. Its bytes lie as layer, then key and value, then token, then KV head, then head dimension, little
endian. The keys and values of one layer are its *part*; every part starts at a multiple of 64 bytes:

    | layer 0: keys, values | pad | layer 1: keys, values | pad | …
    0                             part_stride                   2 * part_stride

The pads belong to the span: they are counted in its length and covered by its digest, and say nothing.
`SPAN_LAYOUT` names this layout; the session compares the name, so that another can be negotiated later.

Not here: which spans a prefill makes (`plan.py`), which have arrived (`coverage.py`), the message that
carries one (`common/wire`).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.geometry import GroupGeometry
from common.kv.ranges import Range

SPAN_LAYOUT = "layer-kv-token-head-dim/le/64"
"""Name of the only layout so far: nesting order / byte order / alignment of a part."""

PART_ALIGNMENT = 64
"""Bytes; every part of a span, and so every span, starts at a multiple of it."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span as told by the producer: what it covers, where its bytes are, when they were written."""

    transfer_id: int
    attempt: int

    slot_id: int
    generation: int
    """Of the slot; a span with an old one is stale."""

    sequence: int
    """Number of the span within the attempt, unique; ReleaseSpan names it."""

    group_index: int

    layers: Range
    """Group layer indices."""

    tokens: Range
    """Absolute positions."""

    offset: int
    """First byte, counted from the start of the slab."""

    length: int
    """Bytes, pads included."""

    digest: bytes
    """Of all `length` bytes; empty when the session agreed on none."""

    written_ns: int
    """CLOCK_MONOTONIC when the last byte was in the slab."""

    sealed_ns: int
    """CLOCK_MONOTONIC when the span was handed to the stream."""

    @property
    def extent(self) -> Range:
        """Return the bytes of the slab that the span occupies."""
        return Range(self.offset, self.offset + self.length)


def align_up(num_bytes: int, alignment: int = PART_ALIGNMENT) -> int:
    """Return the smallest multiple of `alignment` that is not below `num_bytes`."""
    return -(-num_bytes // alignment) * alignment


def part_stride(group: GroupGeometry, num_tokens: int) -> int:
    """Return the bytes from the start of one layer's part to the start of the next."""
    # Keys and values are padded together and not each: values follow keys without a gap.
    return align_up(2 * group.row_bytes * num_tokens)


def span_bytes(group: GroupGeometry, num_layers: int, num_tokens: int) -> int:
    """Return the length of a span of this shape, pads included."""
    return num_layers * part_stride(group, num_tokens)


def part_offset(group: GroupGeometry, num_tokens: int, layer_position: int) -> int:
    """Return where the part of the span's layer number `layer_position` starts within the span."""
    return layer_position * part_stride(group, num_tokens)


def key_range(group: GroupGeometry, num_tokens: int, layer_position: int) -> Range:
    """Return the bytes, within the span, of the keys of one layer."""
    start = part_offset(group, num_tokens, layer_position)
    return Range(start, start + group.row_bytes * num_tokens)


def value_range(group: GroupGeometry, num_tokens: int, layer_position: int) -> Range:
    """Return the bytes, within the span, of the values of one layer."""
    start = key_range(group, num_tokens, layer_position).stop
    return Range(start, start + group.row_bytes * num_tokens)
