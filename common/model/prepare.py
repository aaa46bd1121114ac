"""What both services do before they serve: model, linears, prefill, and who they make the service.

Theory of operation: threads are set first, since kernels are chosen by trying them; memory that loading
took is given back before the caller allocates a cache. Decode prepares a prefill too: it computes prompts
itself when it has to, with the same numerics as any prefill service.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

import torch

from common.engine.identity import EngineIdentity
from common.errors import ConfigError
from common.model.forward.linears import STABLE_ROWS, stabilise
from common.model.forward.prefill import ChunkedPrefill, numerics
from common.model.loader import LoadedModel, load_model
from common.model.torch_engine import TorchEngine
from common.runtime.memory import trim_memory
from common.runtime.threads import resolve_threads
from common.settings import ServiceConfig
from common.telemetry.logging import log_fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model ready to compute with."""

    loaded: LoadedModel
    engine: TorchEngine
    linears: str
    """What the kernels of the linears promise about rows."""

    threads: int


def prepare(config: ServiceConfig, max_prompt_tokens: int, max_rows: int = STABLE_ROWS) -> Prepared:
    """Load the model and prepare it for prompts up to `max_prompt_tokens` and batches up to `max_rows`.

    Blocking, before the event loop serves anything. Raises `ConfigError` or `UnsupportedModel`; nothing stays
    allocated then.
    """
    threads = resolve_threads(config.threads)
    torch.set_num_threads(threads)
    # A bar is for somebody who watches; in a file or between lines of JSON it is noise.
    progress = sys.stderr.isatty() and not config.log_json
    loaded = load_model(config.model, config.dtype, progress=progress)
    max_prompt = min(max_prompt_tokens, context_tokens(config.max_context_tokens, loaded))
    for note in loaded.notes:
        logger.warning("model.noted", extra=log_fields(model=loaded.name, note=note))
    report = stabilise(loaded.model, max(max_rows, STABLE_ROWS))
    trim_memory()
    prefill = ChunkedPrefill(loaded.model, loaded.geometry, config.chunk_tokens, max_prompt)
    engine = TorchEngine(prefill, identity_of(loaded), numerics(loaded.model, config.chunk_tokens, report))
    return Prepared(loaded, engine, report.rows_rule, threads)


def context_tokens(wanted: int, loaded: LoadedModel) -> int:
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
