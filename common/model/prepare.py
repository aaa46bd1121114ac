"""What engines and backends over a transformers model do first: load it, settle its linears, make a prefill.

Theory of operation: threads are set first, since kernels are chosen by trying them; memory that loading
took is given back before the caller allocates a cache. Decode prepares a prefill too: it computes prompts
itself when it has to, with the same numerics as any prefill service.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from common.engine.identity import EngineIdentity
from common.engine.setup import EngineSetup
from common.errors import ConfigError
from common.model.forward.linears import STABLE_ROWS, LinearReport, stabilise
from common.model.forward.prefill import ChunkedPrefill, numerics
from common.model.loader import LoadedModel, load_model, read_text_model
from common.model.text.vocabulary import Vocabulary
from common.model.torch_engine import TorchEngine
from common.runtime.memory import trim_memory
from common.telemetry.logging import log_fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model ready to compute with."""

    loaded: LoadedModel
    engine: TorchEngine


class TextSide(Protocol):
    """What a decode service has to know of its model beside what computes."""

    @property
    def name(self) -> str:
        """What clients call it."""

    @property
    def tokenizer(self) -> Vocabulary:
        """What turns ids into text."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output that the config says."""

    @property
    def max_stretched(self) -> int:
        """As many as its position encoding can be stretched to."""


@runtime_checkable
class HoldsModel(Protocol):
    """A backend that has read the folder of its model, so that nobody has to read it again."""

    @property
    def text(self) -> TextSide | None:
        """What it read; None when it read nothing."""


def text_side(setup: EngineSetup, backend: object) -> TextSide:
    """Return what a backend has read of its model, or read it.

    Raises: `ConfigError` or `UnsupportedModel`.
    """
    if isinstance(backend, HoldsModel) and backend.text is not None:
        return backend.text
    text = read_text_model(setup.model, setup.show_progress)
    for note in text.notes:
        logger.warning("model.noted", extra=log_fields(model=text.name, note=note))
    return text


def make_engine(setup: EngineSetup) -> TorchEngine:
    """Return the engine `torch`; it has no options."""
    setup.options.close()
    return prepare(setup).engine


def prepare(setup: EngineSetup, max_rows: int = STABLE_ROWS) -> Prepared:
    """Load the model and prepare it for prompts up to `max_prompt_tokens` and batches up to `max_rows`.

    Blocking, before the event loop serves anything. Raises `ConfigError` or `UnsupportedModel`; nothing stays
    allocated then.
    """
    stable = load_stable(setup, max_rows)
    loaded = stable.loaded
    prefill = ChunkedPrefill(loaded.model, loaded.geometry, setup.chunk_tokens, stable.max_prompt_tokens)
    rules = numerics(loaded.model, setup.chunk_tokens, stable.report)
    return Prepared(loaded, TorchEngine(prefill, identity_of(loaded), rules, stable.report.rows_rule))


@dataclass(frozen=True, slots=True)
class StableModel:
    """A model in memory whose linears give the same bits whatever the number of rows."""

    loaded: LoadedModel
    report: LinearReport
    max_prompt_tokens: int
    """Longest prompt that both the service wants and the model was made for."""


def load_stable(setup: EngineSetup, max_rows: int = STABLE_ROWS) -> StableModel:
    """Load the model and settle its linears for batches of up to `max_rows`; see `prepare`."""
    torch.set_num_threads(setup.threads)
    loaded = load_model(setup.model, setup.dtype, progress=setup.show_progress)
    max_prompt = min(setup.max_prompt_tokens, context_tokens(setup.max_context_tokens, loaded))
    for note in loaded.notes:
        logger.warning("model.noted", extra=log_fields(model=loaded.name, note=note))
    report = stabilise(loaded.model, max(max_rows, STABLE_ROWS))
    trim_memory()
    return StableModel(loaded, report, max_prompt)


def context_tokens(wanted: int, loaded: TextSide) -> int:
    """Return the tokens of the longest prompt with its answer; `wanted` is 0 for what the config says.

    Raises `ConfigError` when the positions of the model do not reach as far.
    """
    if wanted > loaded.max_stretched:
        says, most = f"max_position_embeddings is {loaded.max_context}", loaded.max_stretched
        problem = f"{says}, and the positions of this model reach {most} at most"
        raise ConfigError("max_context_tokens", wanted, problem)
    return wanted or loaded.max_context


def identity_of(loaded: LoadedModel) -> EngineIdentity:
    """Return the checkpoint that was loaded."""
    return EngineIdentity(
        model_name=loaded.name,
        fingerprint=loaded.fingerprint,
        config_fields=loaded.config_fields,
        tokenizer_fields=loaded.tokenizer_fields,
        geometry=loaded.geometry,
    )
