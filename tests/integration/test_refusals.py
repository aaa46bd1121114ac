"""What does not fit is refused by name before it can do harm (rows N, R): at start or at the session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from transformers import PreTrainedConfig

from common.errors import UnsupportedModel
from common.wire.failure import RemoteFailure
from decode_service import app as decode_app
from decode_service.app import DecodeService
from decode_service.config import DecodeConfig
from decode_service.prefill.prefill_client import PeerState
from kvspan import cli
from kvspan.client import AsyncClient
from kvspan.commands.command import EXIT_FAILED, EXIT_OK
from kvspan.v1 import decode_pb2 as pb
from prefill_service import app as prefill_app
from tests.integration.conftest import Configs, LoadPair
from tests.support import cases
from tests.support.pair import (
    make_configs,
    open_session,
    running_decode,
    running_prefill,
    wait_until,
)

Load = Callable[[Any], object]

SERVICES: list[tuple[str, Load]] = [
    ("prefill", lambda configs: prefill_app.load(configs[0])),
    ("decode", lambda configs: decode_app.load(configs[1])),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prefill(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, str], load: LoadPair
) -> AsyncIterator[Configs]:
    """Run a DENSE prefill service; return the configurations of a pair of which it is one half."""
    configs = make_configs(tmp_path_factory.mktemp("prefill"), checkpoints["DENSE"])
    copies = load(*configs)
    async with running_prefill(configs[0], copies.prefill):
        async with (
            running_decode(configs[1], copies.decode) as (service, address),
            AsyncClient(address) as client,
        ):
            await open_session(service)
            await client.complete(token_ids=[1], max_new_tokens=1)
        yield configs


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service[0])
@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (cases.linear_attention_config(), ["0:linear_attention", "1:linear_attention", "2:linear_attention"]),
        (cases.state_space_config(), ["0:linear_attention", "1:linear_attention", "2:linear_attention"]),
    ],
    ids=["qwen3-next", "mamba"],
)
async def test_r1_r2_r3_recurrent_layers_are_refused_at_start_by_either_side(
    tmp_path: Path, service: tuple[str, Load], config: PreTrainedConfig, layers: list[str]
) -> None:
    """R1, R2, R3: each service refuses such a model from its config alone, naming every such layer."""
    folder = save_config(config, tmp_path / "model")

    with pytest.raises(UnsupportedModel) as caught:
        service[1](make_configs(tmp_path, folder))

    assert list(caught.value.layers) == layers
    assert all(layer in str(caught.value) for layer in layers)


@pytest.mark.parametrize(
    ("changes", "config", "fields"),
    [
        ({"dtype": "bfloat16"}, {}, ["geometry.layers[0].dtype", "numerics.engine"]),
        (
            {},
            {
                "use_sliding_window": True,
                "sliding_window": 48,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
            ["geometry.layers[3].window", "geometry.layers[3].group", "config.sliding_window"],
        ),
    ],
    ids=["dtype", "window-and-group"],
)
async def test_n1_n3_one_different_field_is_refused_by_name(
    prefill: Configs,
    tmp_path: Path,
    changes: dict[str, Any],
    config: dict[str, Any],
    fields: Sequence[str],
) -> None:
    """N1, N3: whatever differs is named with both values before a session opens, and health says so."""
    folder = prefill[0].model
    if config:
        folder = cases.save_model(cases.dense_config(**config), tmp_path / "other")
    decode = replace(decode_at(prefill[1], tmp_path), model=folder, **changes)

    status = await refused_status(decode)

    (peer,) = status.peers
    assert peer.state == pb.SESSION_STATE_REFUSED
    assert peer.num_sessions == 0
    for field in fields:
        assert f"{field}: decode " in peer.problem, peer.problem
    assert files_in(decode.slab_dir) == []


@pytest.mark.parametrize(("model", "config"), [("DENSE", cases.dense_config), ("HYB", cases.hybrid_config)])
async def test_n3_s6_s18_heads_that_are_cut_otherwise_are_refused_at_set_up(
    tmp_path: Path,
    checkpoints: dict[str, str],
    load: LoadPair,
    model: str,
    config: Callable[[], PreTrainedConfig],
) -> None:
    """N3, S6, S18: a plain and a windowed model with one KV head a side are refused before any request."""
    configs, other = make_configs(tmp_path, checkpoints[model]), config()
    other.num_key_value_heads = 1
    decode = replace(configs[1], model=cases.save_model(other, tmp_path / "other"))
    async with running_prefill(configs[0], load(*configs).prefill) as (prefill_service, _):
        status = await refused_status(decode)
        assert prefill_service.servicer.peers == ()

    assert status.requests.submitted == status.peers[0].num_sessions == 0
    assert status.peers[0].state == pb.SESSION_STATE_REFUSED
    for layer in range(other.num_hidden_layers):
        assert f"geometry.layers[{layer}].num_kv_heads: decode 1, prefill 2" in status.peers[0].problem
    assert files_in(decode.slab_dir) == []


async def test_n3_n6_a_refused_peer_fails_requests_at_once(
    prefill: Configs, tmp_path: Path, load: LoadPair
) -> None:
    """N3, N6: a client is told at once why the peer does not fit, and nothing of the host."""
    other = tmp_path / "elsewhere"
    other.mkdir()
    decode = replace(decode_at(prefill[1], tmp_path), slab_dir=str(other))
    async with (
        running_decode(decode, load(*prefill).decode) as (service, address),
        AsyncClient(address) as client,
    ):
        await wait_until(lambda: is_refused(service))
        with pytest.raises(RemoteFailure) as caught:
            await client.complete(token_ids=[1, 2], max_new_tokens=1, route="remote")

    failure = caught.value
    assert (failure.reason, failure.metadata["cause"]) == ("PREFILL_UNAVAILABLE", "SLAB_NOT_SHARED")
    assert [difference.field for difference in failure.differences] == ["slab.socket"]
    assert "slab.socket: decode made one, prefill cannot open it" in failure.message
    assert str(tmp_path) not in f"{failure} {failure.metadata} {failure.differences}"


async def test_check_passes_only_a_pair_that_shares_memory(
    prefill: Configs,
    tmp_path: Path,
    load: LoadPair,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`kvspan check` asks for the session too: equal capabilities say nothing of the slab."""
    decode, loaded = decode_at(prefill[1], tmp_path), load(*prefill).decode
    other = tmp_path / "elsewhere"
    other.mkdir()
    codes = []
    for config in (decode, replace(decode, slab_dir=str(other))):
        arguments = ["check", f"--decode={config.listen}", f"--prefill={prefill[0].listen}"]
        async with running_decode(config, loaded):
            codes.append(await asyncio.to_thread(cli.main, arguments))

    output = capsys.readouterr().out
    assert codes == [EXIT_OK, EXIT_FAILED]
    assert output.count(" 0 differ") == 1
    assert output.count(" 1 differ") == 1
    assert "no session: SLAB_NOT_SHARED: " in output


async def test_n5_serving_without_a_prefill_service_is_visible(
    tmp_path: Path, checkpoints: dict[str, str], load: LoadPair
) -> None:
    """N5: without a prefill service the counters and capabilities say that prompts are computed here."""
    prefill_config, decode_config = make_configs(tmp_path, checkpoints["DENSE"])
    alone = replace(decode_config, prefill=())
    loaded = load(prefill_config, decode_config).decode
    async with running_decode(alone, loaded) as (_, address), AsyncClient(address) as client:
        await client.complete(token_ids=[1, 2, 3], max_new_tokens=1)
        status, told = await client.status(), await client.capabilities()

    assert (status.prompts_remote, status.prompts_local) == (0, 1)
    assert not status.peers
    assert list(told.routes) == [pb.ROUTE_LOCAL]
    assert told.default_route == pb.ROUTE_LOCAL


def files_in(folder: Path | str) -> list[Path]:
    """Return what lies in a folder."""
    return list(Path(folder).iterdir())


def decode_at(config: DecodeConfig, folder: Path) -> DecodeConfig:
    """Return the configuration for a decode service that listens in `folder`."""
    return replace(config, listen=f"unix:{folder}/decode.sock")


def is_refused(service: DecodeService) -> bool:
    """Tell whether the peer was refused."""
    return service.peers[0].statistics().state is PeerState.REFUSED


async def refused_status(
    config: DecodeConfig, loaded: decode_app.Loaded | None = None
) -> pb.GetStatusResponse:
    """Return what an operator sees of a decode service whose peer does not fit."""
    async with (
        running_decode(config, loaded or decode_app.load(config)) as (service, address),
        AsyncClient(address) as client,
    ):
        await wait_until(lambda: is_refused(service))
        return await client.status()


def save_config(config: PreTrainedConfig, folder: Path) -> str:
    """Write a folder with a config and no weights: whoever reads weights first fails in another way."""
    config.save_pretrained(folder)
    return str(folder)
