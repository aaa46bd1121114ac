"""Tiny models, and a prompt's way through them: prefill, pages, decode steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from common.engine.decode import LaneStep
from common.engine.prefill import Logits, wanted_of
from common.kv.geometry import DType, KVGeometry
from common.kv.ranges import Range
from common.kv.tables import PageTable
from common.kv.writer import Rows
from common.model.describe import describe
from common.model.folder.source import TinyFamily
from common.model.forward.linears import stabilise
from common.model.forward.prefill import ChunkedPrefill
from common.model.loader import TORCH_DTYPES
from common.model.tiny import make_tiny, tiny_config, tiny_gemma3_config
from common.model.torch_engine import TorchEngine
from decode_service.generate.backends.torch_backend import TorchBackend
from decode_service.prefill.page_writer import PageWriter
from tests.support.fakes import make_engine_identity

MAX_LANES = 8
PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model ready for kvspan; `reference` has the same weights and transformers' own modules."""

    model: PreTrainedModel
    reference: PreTrainedModel
    geometry: KVGeometry


def make_model(
    family: TinyFamily = TinyFamily.LLAMA,
    *,
    window: int | None = None,
    dtype: DType = DType.FLOAT32,
) -> TinyModel:
    """Return a tiny model of a family; `window` overrides that of gemma3."""
    # A config each: it names the attention implementation, which kvspan changes.
    model, reference = (make_tiny(_config(family, window), 3, TORCH_DTYPES[dtype]) for _ in range(2))
    stabilise(model, MAX_LANES)
    return TinyModel(model, reference, describe(model.config, dtype))


def _config(family: TinyFamily, window: int | None) -> PreTrainedConfig:
    return tiny_config(family) if window is None else tiny_gemma3_config(window)


def make_prompt(length: int, seed: int = 5) -> list[int]:
    """Return random byte tokens."""
    return random.Random(seed).choices(range(256), k=length)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def dense(geometry: KVGeometry, prompt_len: int, first_token: int = 0) -> dict[int, Range]:
    """Return a wish for every position from `first_token` on, of windowed layers too."""
    return {layer.layer_index: Range(first_token, prompt_len) for layer in geometry.layers}


def never() -> bool:
    """Be a prefill's `is_cancelled` that is never true."""
    return False


@dataclass(slots=True)
class RecordingWriter:
    """A `KVWriter` that keeps what it gets, as bytes."""

    writes: list[tuple[int, Range, bytes, bytes]] = field(default_factory=list)

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Keep a copy."""
        self.writes.append((layer_index, tokens, keys.tobytes(), values.tobytes()))


@dataclass(slots=True)
class PagedSequence:
    """One sequence in pages: its tables and its next position."""

    tables: tuple[PageTable, ...]
    position: int

    def lane(self, token_id: int) -> LaneStep:
        """Return the lane of the next step."""
        return LaneStep(token_id, self.position, self.tables)


class PagedRunner:
    """Prefills prompts into pages and decodes them; pages can be dealt in any order."""

    def __init__(self, tiny: TinyModel, *, num_pages: int = 160, shuffle_seed: int | None = None) -> None:
        self.geometry = tiny.geometry
        prefill = ChunkedPrefill(tiny.model, tiny.geometry, PAGE_TOKENS, PAGE_TOKENS)
        engine = TorchEngine(prefill, make_engine_identity(tiny.geometry), ("tiny",))
        self.backend = TorchBackend(tiny.model, engine, MAX_LANES)
        self.backend.allocate(PAGE_TOKENS, [num_pages] * len(tiny.geometry.groups))
        self._free = [list(range(num_pages)) for _ in tiny.geometry.groups]
        if shuffle_seed is not None:
            for pages in self._free:
                random.Random(shuffle_seed).shuffle(pages)

    def start(
        self, prefill: ChunkedPrefill, prompt: Sequence[int], growth: int = 32
    ) -> tuple[PagedSequence, Logits]:
        """Prefill into fresh pages, only what is required; returns the sequence and the last logits."""
        required = self.geometry.required(0, len(prompt))
        tables = tuple(
            self._deal(group_index, wanted.start, len(prompt) + growth)
            for group_index, wanted in enumerate(required)
        )
        writer = PageWriter(self.backend, self.geometry, tables, required)
        logits = prefill.prefill(prompt, wanted_of(self.geometry, required), writer, never)
        assert writer.missing() == ()
        return PagedSequence(tables, len(prompt)), logits

    def decode(self, sequence: PagedSequence, logits: Logits, num_tokens: int) -> list[int]:
        """Return greedy tokens of one sequence alone."""
        tokens = [int(logits.argmax())]
        while len(tokens) < num_tokens:
            row = self.backend.step([sequence.lane(tokens[-1])])[0]
            sequence.position += 1
            tokens.append(int(row.argmax()))
        return tokens

    def _deal(self, group_index: int, start: int, stop: int) -> PageTable:
        first, last = start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)
        pages = tuple(self._free[group_index].pop(0) for _ in range(last - first))
        return PageTable(PAGE_TOKENS, first, pages)


def generate(reference: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the greedy tokens of transformers' own `generate`, end tokens ignored."""
    ids = torch.tensor([list(prompt)])
    output = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
