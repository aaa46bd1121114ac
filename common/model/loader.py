"""Load a model once, with everything both services need to know about it.

Theory of operation: the config is read and described first, so that a model kvspan cannot serve is refused
before a weight is touched. Weights that the checkpoint lacks are an error, never random. After loading, a
forward of two tokens checks the description. Only local files are read.

Not here: attention over pages (`common/model/forward/attention.py`), prefill
(`common/model/forward/prefill.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from common.errors import ConfigError
from common.excerpt import excerpt
from common.kv.geometry import DType, KVGeometry
from common.model.demo import ensure_demo_checkpoint
from common.model.describe import check_against, describe, text_config, use_plainly
from common.model.fingerprint import config_fields, fingerprint, tokenizer_fields
from common.model.folder.cache import DEMO_NAME, cache_folder
from common.model.folder.checkpoint import Checkpoint, read_checkpoint
from common.model.folder.configuration import read_config
from common.model.folder.files import CONFIG, TOKENIZER, check_complete
from common.model.folder.source import ModelSource, SourceKind, parse_source
from common.model.foreign_code import code_notes
from common.model.generation import EndTokens, check_generation, end_ids, unused_defaults
from common.model.library import blamed
from common.model.positions import context_limits, ignored_keys
from common.model.progress import shown_progress
from common.model.text.tokenizer_files import read_tokenizer
from common.model.text.vocabulary import Vocabulary
from common.model.tiny import make_byte_tokenizer, make_tiny, tiny_config
from common.model.unread_keys import unread_keys
from common.model.weights import load_weights
from common.session.identity import ModelFingerprint

TORCH_DTYPES = {
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
    DType.FLOAT32: torch.float32,
}

_TINY_SEED = 0
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True, slots=True)
class TextModel:
    """What is known of a model without its weights: what turns text into tokens and back, and its limits."""

    name: str
    """What clients call it."""

    tokenizer: Vocabulary
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_context: int
    max_stretched: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory; shared, never changed but for its attention implementation."""

    source: ModelSource

    name: str
    """What clients call it."""

    model: PreTrainedModel
    """In evaluation mode, no gradients, on the CPU."""

    tokenizer: Vocabulary
    config: PreTrainedConfig
    geometry: KVGeometry
    fingerprint: ModelFingerprint

    config_fields: tuple[tuple[str, str], ...]
    """What the config digest covers, key by key, so that a peer's difference can be named."""

    tokenizer_fields: tuple[tuple[str, str], ...]
    """What the tokenizer digest covers, part by part."""

    dtype: DType
    """Of weights, activations and KV."""

    eos_ids: tuple[int, ...]
    """Tokens that end a sequence, ascending: those of the generation config and of the tokenizer."""

    max_context: int
    """Tokens of prompt and output together that the config says."""

    max_stretched: int
    """As many as its position encoding can be stretched to; not below `max_context`."""

    notes: tuple[str, ...]
    """What the folder says that is not obeyed, or is obeyed otherwise than people may think; for the log."""


@dataclass(frozen=True, slots=True)
class _Parts:
    model: PreTrainedModel
    tokenizer: FastTokenizer
    geometry: KVGeometry
    notes: tuple[str, ...] = ()


def load_model(spec: str, dtype: str, progress: bool) -> LoadedModel:
    """Load the model a spec stands for; `progress` shows a bar on stderr.

    Raises ConfigError when the spec, the folder or the dtype is wrong, and UnsupportedModel when kvspan
    cannot hand over this model's KV.
    """
    source = parse_source(spec)
    kv_dtype = resolve_dtype(dtype)
    if source.family is not None:
        parts = _make_tiny_parts(source, kv_dtype)
    else:
        folder = _folder_of(source, progress)
        with shown_progress(progress):
            parts = _load_parts(spec, folder, kv_dtype)
    with blamed(spec, source.folder or Path(spec)):
        return _examine(source, parts, kv_dtype)


def read_text_model(spec: str, progress: bool) -> TextModel:
    """Read what of a model needs no weights; for a backend that loads them in a way of its own.

    Raises ConfigError and UnsupportedModel as `load_model` does, for what is wrong beside the weights.
    """
    source, notes = parse_source(spec), tuple[str, ...]()
    if source.family is not None:
        config, tokenizer = tiny_config(source.family), make_byte_tokenizer()
        generation = GenerationConfig.from_model_config(config)
    else:
        folder = _folder_of(source, progress)
        read = _read_folder(spec, folder)
        config, tokenizer, notes = read.config, read.tokenizer, read.notes
        with blamed(spec, folder):
            generation = _generation(folder, config)
    with blamed(spec, source.folder or Path(spec)):
        vocab_size = describe(config, DType.FLOAT32).vocab_size
        return _text_of(source, config, tokenizer, generation, vocab_size, notes)


def _text_of(  # noqa: PLR0913 - the parts of a model that need no weights
    source: ModelSource,
    config: PreTrainedConfig,
    tokenizer: FastTokenizer,
    generation: Any,
    vocab_size: int,
    notes: tuple[str, ...],
) -> TextModel:
    told = EndTokens(generation.eos_token_id, text_config(config).eos_token_id, tokenizer.eos_token_id)
    eos_ids, end_notes = end_ids(source.spec, told, vocab_size)
    max_context, max_stretched = context_limits(text_config(config))
    return TextModel(
        name=DEMO_NAME if source.kind is SourceKind.DEMO else source.name,
        tokenizer=Vocabulary(tokenizer),
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        max_context=max_context,
        max_stretched=max_stretched,
        notes=(*notes, *end_notes, *unused_defaults(generation.to_diff_dict())),
    )


def _generation(folder: Path, config: PreTrainedConfig) -> Any:
    if (folder / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    return GenerationConfig.from_model_config(config)


def _examine(source: ModelSource, parts: _Parts, dtype: DType) -> LoadedModel:
    """Return a model with all that is known about it, once a trial has shown what was described."""
    check_against(parts.model, parts.geometry)
    model = parts.model
    text = _text_of(
        source, model.config, parts.tokenizer, model.generation_config, parts.geometry.vocab_size, parts.notes
    )
    fields = config_fields(model.config), tokenizer_fields(parts.tokenizer)
    return LoadedModel(
        source=source,
        name=text.name,
        model=model,
        tokenizer=text.tokenizer,
        config=model.config,
        geometry=parts.geometry,
        fingerprint=fingerprint(model, *fields),
        config_fields=fields[0],
        tokenizer_fields=fields[1],
        dtype=dtype,
        eos_ids=text.eos_ids,
        max_context=text.max_context,
        max_stretched=text.max_stretched,
        notes=text.notes,
    )


def resolve_dtype(dtype: str) -> DType:
    """Return the dtype a flag stands for.

    `auto` is bfloat16 where the processor computes in it, otherwise float32: without such instructions
    bfloat16 products run three to four times slower than float32 ones (measured).

    Raises ConfigError when there is no such dtype.
    """
    if dtype == "auto":
        return DType.BFLOAT16 if _cpu_has_bf16(Path("/proc/cpuinfo")) else DType.FLOAT32
    try:
        return DType(dtype)
    except ValueError:
        known = ", ".join(["auto", *(kind.value for kind in DType)])
        raise ConfigError("dtype", dtype, f"must be one of {known}") from None


def _cpu_has_bf16(cpuinfo: Path) -> bool:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(not _BF16_FLAGS.isdisjoint(line.split()) for line in lines if line.startswith("flags"))


def _folder_of(source: ModelSource, progress: bool) -> Path:
    if source.folder is not None:
        return source.folder
    return ensure_demo_checkpoint(cache_folder(os.environ), progress)


def _make_tiny_parts(source: ModelSource, dtype: DType) -> _Parts:
    assert source.family is not None
    config = tiny_config(source.family)
    geometry = describe(config, dtype)
    return _Parts(make_tiny(config, _TINY_SEED, TORCH_DTYPES[dtype]), make_byte_tokenizer(), geometry)


def _ignored(config: PreTrainedConfig, written: Mapping[str, Any]) -> tuple[str, ...]:
    keys = (*unread_keys(config, written), *ignored_keys(text_config(config)))
    return (f"{CONFIG}: nobody reads {excerpt(', '.join(keys))}",) if keys else ()


def _load_parts(spec: str, folder: Path, dtype: DType) -> _Parts:
    read = _read_folder(spec, folder)
    with blamed(spec, folder / CONFIG):
        geometry = describe(read.config, dtype)
    model, notes = load_weights(spec, folder, read.config, read.checkpoint, TORCH_DTYPES[dtype])
    return _Parts(model, read.tokenizer, geometry, (*read.notes, *notes))


@dataclass(frozen=True, slots=True)
class _Folder:
    """What a folder holds beside the weights, of which only the heads were read."""

    config: PreTrainedConfig
    tokenizer: FastTokenizer
    checkpoint: Checkpoint
    notes: tuple[str, ...]


def _read_folder(spec: str, folder: Path) -> _Folder:
    written = read_config(spec, folder)
    code = code_notes(spec, folder)
    with blamed(spec, folder / CONFIG):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        use_plainly(config)
        vocab_size = describe(config, DType.FLOAT32).vocab_size
    check_complete(spec, folder)
    check_generation(spec, folder)
    checkpoint = read_checkpoint(spec, folder, written)
    with blamed(spec, folder / TOKENIZER):
        tokenizer = read_tokenizer(spec, folder, vocab_size)
    notes = (*code, *checkpoint.notes, *_ignored(config, written), *tokenizer.notes)
    return _Folder(config, tokenizer.pretrained, checkpoint, notes)
