"""A pair of services: OpenVINO computes the prompts, torch decodes in many lanes or in one."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.wire.failure import RemoteFailure
from kvspan import Client

MODES = ("whole", "deferred", "stream")
READY_S = 120


@contextmanager
def running_pair(model: str, dtype: str, backend: str, folder: Path) -> Iterator[Client]:
    """Yield a client of a pair of processes that ends with the block."""
    address = f"unix:{folder}/decode.sock"
    command = [
        sys.executable, "-m", "kvspan.start", "up", "--model", model, "--listen", address, "--dtype", dtype,
        "--numerics", "declared", "--engine", "openvino", "--engine-option", "widths=32,96",
        "--engine-option", "parts=2", "--threads", "1", "--log-level", "warning", "--slab-bytes", "8MiB",
        "--min-span-bytes", "4096", "--cache-tokens", "1024", "--backend", backend,
        "--lanes", "1" if backend == "single-lane" else "4",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ, text=True) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], READY_S)[0], "not ready in time"
            assert process.stdout.readline().startswith("ready")
            with Client(address) as client:
                yield client
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(
    scope="module",
    params=[
        ("tiny:llama", "float32", "torch"),
        ("tiny:qwen3", "float32", "torch"),
        ("tiny:gemma3", "float32", "torch"),
        ("tiny:llama", "bfloat16", "torch"),
        ("tiny:qwen3", "float32", "single-lane"),
        ("tiny:gemma3", "float32", "single-lane"),
    ],
    ids="-".join,
)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Yield a client of a pair over each model, a session in another type than the engine's, and one lane."""
    model, dtype, backend = request.param
    with running_pair(model, dtype, backend, tmp_path_factory.mktemp("pair")) as client:
        yield client


def ask(client: Client, length: int, mode: str) -> tuple[int, ...]:
    """Return twelve tokens after a prompt."""
    ids = [(17 + 31 * index) % 250 for index in range(length)]
    answer = client.complete(token_ids=ids, max_new_tokens=12, transfer=mode, route="remote", ignore_eos=True)  # type: ignore[arg-type]
    assert answer.prefill_engine.name == "openvino"
    return answer.token_ids


@pytest.mark.parametrize("length", [1, 31, 33, 96])
def test_tokens_are_equal_over_all_modes(client: Client, length: int) -> None:
    """However the KV crossed, and whoever shares the batch."""
    reference = ask(client, length, "whole")

    alone = [ask(client, length, mode) for mode in MODES]
    with ThreadPoolExecutor(4) as threads:
        others = threads.submit(ask, client, 57, "stream")
        together = list(threads.map(lambda mode: ask(client, length, mode), MODES))
        others.result()

    assert [*alone, *together] == [reference] * 6


def test_the_engine_is_told(client: Client) -> None:
    """Status and answers name it with all that decides its bits, and what differs from decode's."""
    (peer,) = client.status().peers

    assert peer.engine.name == "openvino"
    assert "numerics.engine" in {one.field for one in peer.differences}


def test_a_prompt_above_the_largest_width_is_refused(client: Client) -> None:
    """With both numbers, and before it reaches the engine."""
    with pytest.raises(RemoteFailure, match=r"97.*96"):
        ask(client, 97, "stream")
