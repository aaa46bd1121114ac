"""Engines and backends that nobody here knows: found by their place, paired, refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.session.identity import NumericsPolicy
from common.wire.failure import RemoteFailure
from decode_service import app as decode_app
from prefill_service import app as prefill_app
from tests.integration.conftest import LoadPair
from tests.support.pair import make_configs, running_pair

ENGINE, BACKEND = "tests.support.plugin:make_engine", "tests.support.plugin:make_backend"


async def test_a_pair_of_strangers_serves(tmp_path: Path, load: LoadPair) -> None:
    """Neither knows torch, the engine computes each prompt, and the answer names it."""
    configs = make_configs(
        tmp_path,
        engine_factory=ENGINE,
        backend_factory=BACKEND,
        chunk_tokens=16,
        numerics=NumericsPolicy.DECLARED,
    )
    async with running_pair(*configs, load(*configs)) as pair:
        for mode in ("stream", "deferred", "whole"):
            answer = await pair.ask([5, 9, 40], 3, transfer=mode)

            assert answer.token_ids == (41, 42, 43)
            assert answer.prefill_engine.name == "pattern"
        (peer,) = (await pair.client.status()).peers
        assert peer.engine.name == "pattern"
        assert [one.field for one in peer.differences] == ["numerics.engine", "numerics.chunk_tokens"]


async def test_a_backend_that_computes_no_prompts_has_no_route_local(tmp_path: Path, load: LoadPair) -> None:
    """It is refused by name, and the capabilities do not offer it."""
    configs = make_configs(
        tmp_path, engine_factory=ENGINE, backend_factory=BACKEND, numerics=NumericsPolicy.DECLARED
    )
    async with running_pair(*configs, load(*configs)) as pair:
        with pytest.raises(RemoteFailure, match="route"):
            await pair.ask([5, 9], 2, route="local")
        with pytest.raises(RemoteFailure) as refused:
            await pair.ask(list(range(65)), 2)

    assert refused.value.code.name == "OUT_OF_RANGE"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": "gpu"}, "engine=gpu: there is none of that name; known: torch"),
        ({"engine_factory": "tests.support.plugin:make_nothing"}, "NoneType, which lacks identity"),
        ({"engine_factory": "tests.support.plugin:absent"}, "cannot be imported: AttributeError"),
        ({"engine_factory": ENGINE, "engine_option": ("wide=3",)}, "no such option; there are: limit"),
        ({"engine_option": ("wide=3",)}, "engine_option=wide=3: no such option; there are: none"),
    ],
)
def test_an_engine_that_is_none_is_refused_before_anything_is_listened_on(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """By name, with what would do."""
    config, _ = make_configs(tmp_path, **changes)

    with pytest.raises(ConfigError, match=words):
        prefill_app.load(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "gpu"}, "backend=gpu: there is none of that name; known: torch"),
        ({"backend_factory": BACKEND, "prefill": ()}, "prefill=: must name a service"),
        ({"backend_factory": BACKEND, "route": "local"}, "route=local: .* computes no prompts"),
        ({"backend_factory": BACKEND, "on_prefill_loss": "local"}, "computes no prompts"),
    ],
)
def test_a_backend_that_cannot_do_what_is_asked_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """Before the cache is allocated."""
    _, config = make_configs(tmp_path, **changes)

    with pytest.raises(ConfigError, match=words):
        decode_app.load(config)
