"""Which spans a prefill makes, where each lies in the slot and after which layer it is complete.

Theory of operation: prefill runs chunk by chunk on the absolute grid of `chunk_tokens`, or over the whole
prompt as one chunk; inside a chunk layers finish in model order. Per group, consecutive layers of one chunk
are merged into one span until it has `min_span_bytes`, and never above `max_span_bytes`; one layer whose part
is larger is split by tokens; the last layer of a group flushes what is pending, and so does each of
`layer_stops`, where layers end that leave the engine together. A span never crosses a chunk. Only required
positions are carried, so a windowed group gives nothing in chunks before its window:

    chunk        |0        |C        |2C       |3C    prompt_len
    full group   |xxxxxxxxx|xxxxxxxxx|xxxxxxxxx|xxxx|
    windowed                     |xxx|xxxxxxxxx|xxxx|

Chunks in which every group carries the same positions relative to the chunk have the same spans, shifted.
Such a list is made once and shared, so that the size of a plan costs a few steps per chunk and a span
costs something only when it is asked for.

Not here: when spans are written and sealed (`prefill_service/span_writer.py`), how large a slot is leased
(`decode_service/cache/admission.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from common.kv.geometry import GroupGeometry, KVGeometry
from common.kv.ranges import Range
from common.kv.spans import PART_ALIGNMENT, part_stride, span_bytes


@dataclass(frozen=True, slots=True)
class SpanGranularity:
    """How finely a prefill cuts its KV; chosen by the prefill service, told in Welcome."""

    chunk_tokens: int
    """Grid of absolute positions on which prefill runs and which no span crosses; 0 when there is none."""

    min_span_bytes: int
    """Layers merge until a span has this many bytes; 0 gives one span per layer."""

    max_span_bytes: int
    """No span is larger, unless one token of one layer alone is."""

    layer_stops: tuple[int, ...] = ()
    """Layers of the model at which a span begins anew, ascending."""

    def __post_init__(self) -> None:
        if self.chunk_tokens < 0:
            raise ValueError(f"chunk_tokens must be at least 0, got {self.chunk_tokens}")
        if list(self.layer_stops) != sorted(set(self.layer_stops)):
            raise ValueError(f"layer_stops must ascend without repeats, got {self.layer_stops}")
        if self.max_span_bytes < PART_ALIGNMENT:
            raise ValueError(f"max_span_bytes must be at least {PART_ALIGNMENT}, got {self.max_span_bytes}")
        if not 0 <= self.min_span_bytes <= self.max_span_bytes:
            raise ValueError(
                f"min_span_bytes must be within [0, {self.max_span_bytes}], got {self.min_span_bytes}"
            )


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """One span that the prefill will make."""

    group_index: int
    layers: Range
    """Group layer indices."""

    tokens: Range
    """Absolute positions."""

    offset: int
    """Bytes from the start of the slot; a multiple of 64."""

    length: int
    """Bytes, pads included."""

    completed_by: int
    """Model layer index; the span is complete when this layer has finished the span's chunk."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The spans of one chunk: a shared list for a chunk at position 0 and byte 0, and the shift."""

    chunk: Range
    """Absolute positions of the whole chunk, carried or not."""

    offset: int
    """Bytes from the start of the slot to the first span of the chunk."""

    template: tuple[PlannedSpan, ...]
    """Spans in order of completion, as if the chunk began at position 0 and byte 0."""

    @property
    def spans(self) -> tuple[PlannedSpan, ...]:
        """Build the spans of this chunk in order of completion."""
        return tuple(
            PlannedSpan(
                span.group_index,
                span.layers,
                Range(self.chunk.start + span.tokens.start, self.chunk.start + span.tokens.stop),
                self.offset + span.offset,
                span.length,
                span.completed_by,
            )
            for span in self.template
        )


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """Every span of one prefill in order of production."""

    chunks: tuple[ChunkPlan, ...]
    """Ascending; every chunk that prefill has to run, also one that carries nothing."""

    total_bytes: int
    """What a slot must hold so that no byte is used twice."""

    @property
    def num_spans(self) -> int:
        """Spans that the prefill will tell."""
        return sum(len(chunk.template) for chunk in self.chunks)

    @property
    def spans(self) -> tuple[PlannedSpan, ...]:
        """Build all spans in order of production."""
        return tuple(self)

    def __iter__(self) -> Iterator[PlannedSpan]:
        for chunk in self.chunks:
            yield from chunk.spans


def plan_spans(geometry: KVGeometry, required: tuple[Range, ...], granularity: SpanGranularity) -> SpanPlan:
    """Plan the export of what is required of each group.

    A range need not begin on the grid; the chunk it begins in is then carried in part.

    Raises: `ValueError` when there is not one range for each group.
    """
    groups = geometry.groups
    if len(required) != len(groups):
        raise ValueError(f"{len(groups)} groups, {len(required)} ranges")
    templates: dict[tuple[Range, ...], tuple[PlannedSpan, ...]] = {}
    chunks: list[ChunkPlan] = []
    offset = 0
    for chunk in _chunks(required, granularity.chunk_tokens):
        # The key of a template: all chunks between the first and the last carry the same positions, but
        # for the few in which a window begins. So a prompt of any length has a handful of templates.
        carried = tuple(_relative(tokens, chunk) for tokens in required)
        template = templates.get(carried)
        if template is None:
            template = templates[carried] = _plan_chunk(groups, carried, granularity)
        chunks.append(ChunkPlan(chunk, offset, template))
        offset += template[-1].offset + template[-1].length if template else 0
    return SpanPlan(tuple(chunks), offset)


def most_steps(geometry: KVGeometry, prompt_len: int, granularity: SpanGranularity) -> int:
    """Return a bound of what a plan for a prompt costs: its chunks, and the spans of one chunk.

    Asked before a plan is made of sizes that a peer told: with spans of one token a chunk may have as many as
    layers times tokens.
    """
    chunk_tokens = min(granularity.chunk_tokens or prompt_len, prompt_len)
    spans = sum(
        group.num_layers * -(-chunk_tokens // _tokens_per_span(group, chunk_tokens, granularity))
        for group in geometry.groups
    )
    return -(-prompt_len // chunk_tokens) + spans


def _chunks(required: tuple[Range, ...], chunk_tokens: int) -> Iterator[Range]:
    """Yield the chunks of the grid that anything required touches; the last ends where that does."""
    carried = [tokens for tokens in required if tokens]
    # Nothing to carry: without this the chunk in which it would begin were run for nothing.
    if not carried:
        return
    first, stop = min(tokens.start for tokens in carried), max(tokens.stop for tokens in carried)
    step = chunk_tokens or stop
    # From the grid and not from the first: what a position's KV is depends on the chunk it is computed in.
    for start in range(first // step * step, stop, step):
        yield Range(start, min(start + step, stop))


def _relative(tokens: Range, chunk: Range) -> Range:
    """Return the part of `tokens` in the chunk, counted from its start; [0, 0) when there is none."""
    start = max(tokens.start, chunk.start)
    stop = min(tokens.stop, chunk.stop)
    return Range(start - chunk.start, stop - chunk.start) if start < stop else Range(0, 0)


def _plan_chunk(
    groups: tuple[GroupGeometry, ...], carried: tuple[Range, ...], granularity: SpanGranularity
) -> tuple[PlannedSpan, ...]:
    """Plan one chunk that begins at position 0 and byte 0."""
    shapes = [
        (group, layers, piece)
        for group, tokens in zip(groups, carried, strict=True)
        if len(tokens)
        for layers, piece in _cut(group, tokens, granularity)
    ]
    # By the model layer that completes a span. Layers belong to one group each, so equal keys are the pieces
    # of one layer, which the stable sort leaves in order of their tokens.
    shapes.sort(key=lambda shape: shape[0].layer_indices[shape[1].stop - 1])
    spans = []
    offset = 0
    for group, layers, tokens in shapes:
        length = span_bytes(group, len(layers), len(tokens))
        completed_by = group.layer_indices[layers.stop - 1]
        spans.append(PlannedSpan(group.group_index, layers, tokens, offset, length, completed_by))
        offset += length
    return tuple(spans)


def _cut(group: GroupGeometry, tokens: Range, granularity: SpanGranularity) -> list[tuple[Range, Range]]:
    """Return layers and tokens of each span of one group in one chunk, in order of completion."""
    # So many layers that a span reaches the minimum, but no more than the maximum holds. Where not even one
    # layer fits, it is cut by tokens instead, and then layers_per_span is 1:
    #
    #     part <= max:   | layer 0: all tokens | layer 1: all tokens |   one span
    #     part >  max:   | layer 0: some | layer 0: others | …           one span each
    part = part_stride(group, len(tokens))
    layers_per_span = max(1, min(-(-granularity.min_span_bytes // part), granularity.max_span_bytes // part))
    tokens_per_span = _tokens_per_span(group, len(tokens), granularity)
    return [
        (Range(first, min(first + layers_per_span, together.stop)), piece)
        for together in _together(group, granularity.layer_stops)
        for first in range(together.start, together.stop, layers_per_span)
        for piece in _pieces(tokens, tokens_per_span)
    ]


def _tokens_per_span(group: GroupGeometry, num_tokens: int, granularity: SpanGranularity) -> int:
    # The pad of a piece must fit as well, so the maximum counts in whole units of the alignment.
    fitting_bytes = granularity.max_span_bytes // PART_ALIGNMENT * PART_ALIGNMENT
    return max(1, min(num_tokens, fitting_bytes // (2 * group.row_bytes)))


def _together(group: GroupGeometry, layer_stops: tuple[int, ...]) -> Iterator[Range]:
    """Yield the group layer indices that leave the engine together."""
    stops = (bisect_left(group.layer_indices, stop) for stop in layer_stops)
    edges = sorted({0, *stops, group.num_layers})
    yield from (Range(start, stop) for start, stop in pairwise(edges))


def _pieces(tokens: Range, num_tokens: int) -> Iterator[Range]:
    for start in range(tokens.start, tokens.stop, num_tokens):
        yield Range(start, min(start + num_tokens, tokens.stop))
