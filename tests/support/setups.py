"""What factories of engines and backends are given."""

from __future__ import annotations

from common.engine.options import Options
from common.engine.setup import BackendSetup


def make_setup(
    model: str = "tiny:llama",
    options: tuple[str, ...] = (),
    *,
    max_prompt_tokens: int = 900,
    chunk_tokens: int = 64,
    max_lanes: int = 4,
    dtype: str = "float32",
) -> BackendSetup:
    """Return a setup for a small model on one thread; an engine's factory takes it too."""
    return BackendSetup(
        model=model,
        dtype=dtype,
        threads=1,
        chunk_tokens=chunk_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_context_tokens=0,
        options=Options("engine_option", options),
        show_progress=False,
        max_lanes=max_lanes,
    )
