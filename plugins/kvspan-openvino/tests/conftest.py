"""What the tests of the plug-in share: a cache of their own, setups and engines, each made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from kvspan_openvino.engine import OpenVinoEngine

from common.engine.options import Options
from common.engine.setup import EngineSetup

MakeSetup = Callable[..., EngineSetup]


@pytest.fixture(scope="session", autouse=True)
def kvspan_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache folder of these tests, and no other."""
    folder = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("KVSPAN_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def make_setup() -> MakeSetup:
    """Return what makes a setup of a model and options, as a service would."""

    def make(model: str, *options: str, max_prompt_tokens: int = 900, max_context: int = 0) -> EngineSetup:
        return EngineSetup(
            model=model,
            dtype="float32",
            threads=1,
            chunk_tokens=64,
            max_prompt_tokens=max_prompt_tokens,
            max_context_tokens=max_context,
            options=Options("engine_option", options),
            show_progress=False,
        )

    return make


@pytest.fixture(scope="session")
def engine_of(make_setup: MakeSetup) -> Callable[[str], OpenVinoEngine]:
    """Return what makes the engine of a tiny model with widths 32 and 64 in two parts, once for all tests."""
    from kvspan_openvino.factory import create_engine

    return cache(lambda model: create_engine(make_setup(model, "widths=32,64", "parts=2")))
