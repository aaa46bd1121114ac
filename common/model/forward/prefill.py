"""Run a prompt through the model in chunks and hand every layer's KV over as soon as it is there.

Theory of operation: chunks lie on a fixed grid of absolute positions, multiples of `chunk_tokens`; only the
last one may be shorter. The bits of a position's KV depend on the tokens up to the end of its chunk and on
the grid, on nothing else. The model's cache is replaced by `_ChunkCache`: its `update` hands the fresh rows
to the writer without a copy, and keeps in the working store what later chunks of this prompt must see.

    full layer        | 0 ............ chunk.start | chunk |          all positions so far
    windowed layer             | window - 1 tokens | chunk |          moved to the front before each chunk

Ownership: one `ChunkedPrefill` belongs to one thread. The working store is made once, of a size that
`max_prompt_tokens` bounds, and is reused; a prompt of a single chunk does not touch it.

Not here: what takes the rows (`common/kv/writer.py`), which positions are needed (`common/kv/geometry.py`).

Shapes: T tokens of a chunk, L attended tokens, H KV heads, D head size, Q query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.engine.prefill import Logits, Wanted
from common.errors import Cancelled, EngineFailed, PromptTooLong, told
from common.kv.geometry import KVGeometry, LayerGeometry
from common.kv.ranges import Range
from common.kv.writer import KVWriter, Rows
from common.model.forward import attention
from common.model.forward.linears import LinearReport

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16))
"""Widest first: the fewer the elements, the faster numpy copies a row."""


class ChunkedPrefill:
    """Computes the KV and the last logits of one prompt at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        geometry: KVGeometry,
        chunk_tokens: int,
        max_prompt_tokens: int,
        widths: tuple[int, ...] = (),
    ) -> None:
        """Compute in chunks, each padded to the smallest of `widths` that holds it."""
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
        attention.install(model)
        self.geometry = geometry
        """KV-owning layers of the model."""

        self._model = model
        self._chunk_tokens = chunk_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._widths = widths
        # The last chunk may be padded.
        longest = -(-max_prompt_tokens // chunk_tokens) * chunk_tokens if widths else max_prompt_tokens
        self._store = _WorkingStore(geometry, model, chunk_tokens, longest)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one forward."""
        return self._chunk_tokens

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt."""
        return self._max_prompt_tokens

    def prefill(
        self,
        token_ids: Sequence[int],
        wanted: Wanted,
        writer: KVWriter,
        is_cancelled: Callable[[], bool],
    ) -> Logits:
        """Compute a prompt, write the KV of it that is wanted, and return the last logits [vocab].

        Other positions are computed too, but not written. `is_cancelled` is asked in every layer. Raises
        PromptTooLong, Cancelled, and whatever the writer raises; the next prompt may follow.
        """
        self._check(token_ids, wanted)
        with torch.inference_mode():
            for chunk in grid(len(token_ids), self._chunk_tokens):
                is_last = chunk.stop == len(token_ids)
                padded = Range(chunk.start, chunk.start + self._width(len(chunk)))
                cache = _ChunkCache(self._store, padded, _Export(wanted, writer, is_cancelled), is_last)
                output = self._forward(token_ids[chunk.start : chunk.stop], padded, cache)
                cache.check_complete()
            logits: Logits = output.logits[0, -1].float().cpu().numpy()
        return logits

    @property
    def store_bytes(self) -> int:
        """Address space of the working store; only touched by prompts of more than one chunk."""
        return self._store.num_bytes

    def _check(self, token_ids: Sequence[int], wanted: Wanted) -> None:
        too_far = [tokens for tokens in wanted.values() if tokens.stop > len(token_ids)]
        if too_far or not token_ids:
            raise ValueError(f"cannot export {too_far} of {len(token_ids)} tokens")
        if len(token_ids) > self._max_prompt_tokens:
            raise PromptTooLong("max_prompt_tokens", len(token_ids), self._max_prompt_tokens)

    def _width(self, num_tokens: int) -> int:
        """Return how many rows a chunk of so many tokens takes."""
        return next((width for width in self._widths if width >= num_tokens), num_tokens)

    def _forward(self, token_ids: Sequence[int], chunk: Range, cache: _ChunkCache) -> Any:
        device = self._model.device
        # Padding stands behind the tokens, which therefore do not see it.
        padding = [0] * (len(chunk) - len(token_ids))
        ids_1T = torch.tensor([[*token_ids, *padding]], dtype=torch.long, device=device)
        positions_1T = torch.arange(chunk.start, chunk.stop, device=device)[None]
        try:
            return self._model(
                input_ids=ids_1T,
                position_ids=positions_1T,
                cache=cache,
                use_cache=True,
                logits_to_keep=torch.tensor([len(token_ids) - 1], device=device) if padding else 1,
            )
        except (RuntimeError, IndexError) as error:
            raise EngineFailed(f"prefill of {chunk}: {told(error)}") from error


def numerics(model: PreTrainedModel, chunk_tokens: int, linears: LinearReport) -> tuple[str, ...]:
    """Name everything that decides the bits of a prefill's KV, beside weights and tokens."""
    dtype = str(model.dtype).removeprefix("torch.")
    return (f"torch {torch.__version__}", f"dtype {dtype}", f"chunk {chunk_tokens}", linears.numerics)


def grid(prompt_len: int, chunk_tokens: int) -> Iterator[Range]:
    """Yield the chunks of a prompt: absolute multiples of `chunk_tokens`, the last one cut at the end."""
    for start in range(0, prompt_len, chunk_tokens):
        yield Range(start, min(start + chunk_tokens, prompt_len))


class _WorkingStore:
    """Keys and values of earlier chunks of the current prompt, per KV-owning layer."""

    def __init__(
        self, geometry: KVGeometry, model: PreTrainedModel, chunk_tokens: int, max_prompt_tokens: int
    ) -> None:
        self._layers = {layer.layer_index: layer for layer in geometry.layers}
        self._kept = {
            layer.layer_index: _new_rows(layer, model, chunk_tokens, max_prompt_tokens)
            for layer in geometry.layers
        }
        self._chunk_tokens = chunk_tokens
        self.device = model.device

    @property
    def num_bytes(self) -> int:
        return sum(kept.numel() * kept.element_size() for kept in self._kept.values())

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def layer(self, layer_index: int) -> LayerGeometry:
        layer = self._layers.get(layer_index)
        if layer is None:
            raise EngineFailed(f"the model stores KV of layer {layer_index}, which its geometry lacks")
        return layer

    def extend(self, layer: LayerGeometry, chunk: Range, key_THD: Tensor, value_THD: Tensor) -> Tensor:
        """Append a chunk's rows; returns what the chunk attends to, keys and values [2, L, H, D], a view."""
        kept = self._kept[layer.layer_index]
        start = _first_kept(chunk.start, layer.window)
        if chunk.start:
            previous = _first_kept(chunk.start - self._chunk_tokens, layer.window)
            _move_to_front(kept, start - previous, chunk.start - start)
        visible = kept[:, : chunk.stop - start]
        visible[0, chunk.start - start :] = key_THD
        visible[1, chunk.start - start :] = value_THD
        return visible


def _new_rows(layer: LayerGeometry, model: PreTrainedModel, chunk_tokens: int, max_prompt: int) -> Tensor:
    most = max_prompt if layer.window is None else min(layer.window - 1 + chunk_tokens, max_prompt)
    if max_prompt <= chunk_tokens:
        most = 0
    shape = (2, most, layer.num_kv_heads, layer.head_dim)
    return torch.empty(shape, dtype=model.dtype, device=model.device)


def _first_kept(chunk_start: int, window: int | None) -> int:
    """Return the first position that a query at `chunk_start` sees."""
    return 0 if window is None else max(0, chunk_start - (window - 1))


def _move_to_front(kept: Tensor, start: int, length: int) -> None:
    if start and length:
        tail = kept[:, start : start + length]
        kept[:, :length] = tail if start >= length else tail.clone()


@dataclass(frozen=True, slots=True)
class _Export:
    """What leaves a prefill, and whether it goes on."""

    wanted: Wanted
    writer: KVWriter
    is_cancelled: Callable[[], bool]

    def hand_over(self, layer_index: int, chunk: Range, key_THD: Tensor, value_THD: Tensor) -> None:
        """Give the writer what is wanted of a chunk; nothing of a layer that nobody asked for."""
        told = chunk.intersection(self.wanted.get(layer_index, Range(0, 0)))
        if told:
            part = slice(told.start - chunk.start, told.stop - chunk.start)
            self.writer.write(layer_index, told, to_rows(key_THD[part]), to_rows(value_THD[part]))


class _ChunkCache:
    """The cache of one forward: hands rows over and says what the chunk attends to."""

    def __init__(self, store: _WorkingStore, chunk: Range, export: _Export, is_last: bool) -> None:
        self._store = store
        self._chunk = chunk
        self._export = export
        self._is_last = is_last
        self._masks: dict[int | None, Tensor | None] = {}
        self._num_updates = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens before this chunk; transformers asks."""
        return self._chunk.start

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, **_: object
    ) -> tuple[_ChunkKV, _ChunkKV]:
        """Take the fresh rows [1, H, T, D] of a layer; both results are the same `AttendedKV`."""
        if self._export.is_cancelled():
            raise Cancelled("prefill was cancelled")
        layer = self._store.layer(layer_idx)
        key_THD, value_THD = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        self._num_updates += 1
        self._export.hand_over(layer_idx, self._chunk, key_THD, value_THD)
        if self._chunk.start or not self._is_last:
            visible = self._store.extend(layer, self._chunk, key_THD, value_THD)
            if self._chunk.start:
                key_THD, value_THD = visible
        attended = _ChunkKV(key_THD, value_THD, layer.window, self._mask(layer.window, len(key_THD)))
        return attended, attended

    def check_complete(self) -> None:
        """Raise EngineFailed unless every KV-owning layer was handed over once."""
        told, owned = self._num_updates, self._store.num_layers
        if told != owned:
            raise EngineFailed(f"the model stored KV of {told} layers, its geometry has {owned}")

    def _mask(self, window: int | None, num_keys: int) -> Tensor | None:
        if window not in self._masks:
            self._masks[window] = attention.chunk_mask(len(self._chunk), num_keys, window, self._store.device)
        return self._masks[window]


@dataclass(frozen=True, slots=True)
class _ChunkKV:
    """What a chunk attends to in one layer; the chunk's own positions are the last ones."""

    key_LHD: Tensor
    value_LHD: Tensor
    window: int | None
    mask_TL: Tensor | None

    def attend(self, query_BQTD: Tensor, scaling: float | None) -> Tensor:
        return attention.attend_chunk(query_BQTD, self.key_LHD, self.value_LHD, self.mask_TL, scaling)


def to_rows(rows_THD: Tensor) -> Rows:
    """Return the raw bytes of rows as [T, H, words]; a view where the tensor is on the CPU."""
    rows_THD = rows_THD.detach().cpu()
    if rows_THD.stride(-1) != 1:
        rows_THD = rows_THD.contiguous()
    steps = (rows_THD.shape[-1], rows_THD.storage_offset(), *rows_THD.stride()[:-1])
    itemsize = rows_THD.element_size()
    word = next(word for size, word in _WORDS if all(step * itemsize % size == 0 for step in steps))
    return rows_THD.view(word).numpy()
