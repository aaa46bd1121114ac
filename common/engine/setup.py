"""What a factory of an engine or a backend is given: the settings of the service that concern it."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.options import Options


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine is made of."""

    model: str
    """As the service was told: a folder, `demo` or `tiny:FAMILY`."""

    dtype: str
    """auto, bfloat16, float16 or float32."""

    threads: int
    """CPU threads that it may use."""

    chunk_tokens: int
    """Grid of prefill, for an engine that has one to choose."""

    max_prompt_tokens: int
    """Longest prompt that the service wants; an engine may take less, and says so."""

    max_context_tokens: int
    """Longest prompt with its answer; 0 for what the model's config says."""

    options: Options
    """Its own; a factory reads all it knows and closes them before it loads anything."""

    show_progress: bool
    """Whether somebody watches stderr."""


@dataclass(frozen=True, slots=True)
class BackendSetup(EngineSetup):
    """What a backend is made of."""

    max_lanes: int
    """Rows of the decode batch that the service wants."""
