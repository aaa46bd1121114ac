"""Every engine and backend that is built in keeps the rules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.engine.registry import find
from common.model.kv_reference import KVReference
from decode_service.generate.backends.table import BACKENDS
from kvspan.conformance import (
    BACKEND_CHECKS,
    ENGINE_CHECKS,
    BackendSubject,
    Check,
    EngineSubject,
    Skipped,
)
from prefill_service.engines.table import ENGINES
from tests.support.models import torch_threads
from tests.support.setups import make_setup

MODELS = ("tiny:llama", "tiny:qwen3", "tiny:gemma3")

MADE = {
    "torch": ("torch", ()),
    "fixed-width": ("fixed-width", ("widths=32,64", "layer_group=2")),
    "fixed-width, one pass": ("fixed-width", ("widths=32,64", "passes=one")),
}

LANES = {"torch": 4, "single-lane": 1}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: tiny products are slower on two."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    """Return a model spec."""
    return str(request.param)


@pytest.fixture(scope="module", params=MADE)
def engine(request: pytest.FixtureRequest, model: str) -> EngineSubject:
    """Return each engine over each model, once for all checks: a service does not make it anew either."""
    name, options = MADE[request.param]
    setup = make_setup(model, options, max_prompt_tokens=150, chunk_tokens=64)
    return EngineSubject(find(ENGINES, name)(setup), KVReference(model), num_prompts=40)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=str)
def test_an_engine_keeps_the_rule(engine: EngineSubject, check: Check[EngineSubject]) -> None:
    """All of them apply to it."""
    check.run(engine)


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=str)
@pytest.mark.parametrize("name", LANES)
def test_a_backend_keeps_the_rule(name: str, model: str, check: Check[BackendSubject]) -> None:
    """What does not apply to a model, or to a single lane, says why."""
    subject = BackendSubject(lambda: find(BACKENDS, name)(make_setup(model, max_lanes=LANES[name])))

    if (check.name, name, model) in EXPECTED_SKIPS:
        with pytest.raises(Skipped):
            check.run(subject)
    else:
        check.run(subject)


EXPECTED_SKIPS = {
    *(("window", name, model) for name in LANES for model in ("tiny:llama", "tiny:qwen3")),
    *((check, "single-lane", model) for check in ("company", "import", "beside") for model in MODELS),
}
