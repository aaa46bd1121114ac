"""Prompts computed by another engine than decode's own, where numerics are declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from common.engine.identity import EngineIdentity
from common.engine.prefill import EngineDescription, Logits, PrefillEngine, Wanted
from common.kv.digest import DigestKind
from common.kv.geometry import KVGeometry
from common.kv.plan import SpanGranularity, plan_spans
from common.kv.ranges import Range
from common.kv.spans import Span
from common.kv.writer import KVWriter
from common.runtime.clock import SystemClock
from common.session.identity import NumericsPolicy
from common.session.messages import TransferMode
from common.wire.failure import RemoteFailure
from kvspan.audit.replay import audit_files
from kvspan.client import AsyncClient, Completion
from prefill_service.job import Job, JobResult, run_job
from prefill_service.span_writer import SlotTarget
from tests.integration.conftest import LoadPair
from tests.support.cases import prompt_of
from tests.support.pair import MODES, LoadedPair, Pair, make_configs, running_decode, running_pair
from tests.support.prefill_peers import Owner
from tests.support.sessions import make_start

LENGTHS = (1, 16, 31, 32, 33, 64, 65, 150)
"""About a page, the window of tiny Gemma 3, and a chunk."""


@dataclass(frozen=True, slots=True)
class DenseEngine:
    """An engine that keeps every position of every layer, whatever the model sees, and offers them all."""

    inner: PrefillEngine

    def identity(self) -> EngineIdentity:
        """See `PrefillEngine`."""
        identity = self.inner.identity()
        layers = tuple(replace(layer, window=None) for layer in identity.geometry.layers)
        return replace(identity, geometry=replace(identity.geometry, layers=layers))

    def describe(self) -> EngineDescription:
        """See `PrefillEngine`."""
        return replace(self.inner.describe(), name="dense")

    def prefill(
        self, token_ids: list[int], wanted: Wanted, writer: KVWriter, is_cancelled: Callable[[], bool]
    ) -> Logits:
        """See `PrefillEngine`."""
        everything = dict.fromkeys(wanted, Range(0, len(token_ids)))
        return self.inner.prefill(token_ids, everything, writer, is_cancelled)


def with_dense(loaded: LoadedPair) -> LoadedPair:
    """Return a pair whose producer keeps everything."""
    return replace(loaded, prefill=replace(loaded.prefill, engine=DenseEngine(loaded.prefill.engine)))


def told(completion: Completion) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return what has to be the same."""
    return completion.token_ids, tuple(one.chosen.logprob for one in completion.logprobs)


async def answers(pair: Pair, mode: str) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return the answers to a prompt of each length, all at once."""
    prompts = [prompt_of(length) for length in LENGTHS]
    return [told(one) for one in await pair.ask_all(prompts, 6, route="remote", transfer=mode)]


async def test_n1_a_dense_producer_serves_a_model_with_windows(tmp_path: Path, load: LoadPair) -> None:
    """Gemma 3: decode keeps windows, the producer all; answers are those of a producer with windows."""
    exact = make_configs(tmp_path, "tiny:gemma3")
    async with running_pair(*exact, load(*exact)) as pair:
        expected = await answers(pair, "whole")
        sent = (await pair.ask(prompt_of(150), 1, route="remote")).timings.num_bytes
    prefill, decode = make_configs(tmp_path, "tiny:gemma3", numerics=NumericsPolicy.DECLARED)
    declared = (
        replace(prefill, journal=str(tmp_path / "prefill.jsonl")),
        replace(decode, journal=str(tmp_path / "decode.jsonl")),
    )

    async with running_pair(*declared, with_dense(load(*exact))) as pair:
        found = {mode: await answers(pair, mode) for mode in MODES}
        one = await pair.ask(prompt_of(150), 1, route="remote")
        noted = {difference.field for difference in (await pair.client.status()).peers[0].differences}

    assert found == dict.fromkeys(MODES, expected)
    assert (one.prefill_engine.name, one.timings.num_bytes) == ("dense", sent)
    assert {field.rpartition(".")[2] for field in noted} == {"window", "group"}
    # Each side counts groups of its own; what is wanted of them is decode's.
    assert audit_files([Path(config.journal) for config in declared], all_stopped=True).findings == ()


def crossed(
    engine: PrefillEngine, geometry: KVGeometry, prompt: Sequence[int], first_tokens: tuple[int, ...]
) -> tuple[JobResult, list[Span], bytes]:
    """Return what a job ends with, what it sealed, and the bytes of its slot."""
    granularity = SpanGranularity(engine.describe().chunk_tokens or 0, 4096, 16384)
    start = make_start(token_ids=tuple(prompt), first_tokens=first_tokens)
    start = replace(start, mode=TransferMode.STREAM)
    slot, sealed = bytearray(plan_spans(geometry, start.required, granularity).total_bytes), list[Span]()
    start = replace(start, slot_size=len(slot))
    produced = engine.identity().geometry.dtypes
    target = SlotTarget(start, geometry, produced, memoryview(slot), DigestKind.XXH3_64, sealed.append)
    result = run_job(Job(Owner(3), target, 1, 0), engine, granularity, SystemClock())
    return result, sealed, bytes(slot)


@pytest.mark.parametrize("suffix", ["full", "half", "empty"])
def test_a19_p7_a_dense_producer_exports_any_suffix_as_one_with_windows(
    suffix: str, tmp_path: Path, load: LoadPair
) -> None:
    """Of each group what is asked for and no more, bit for bit; an empty suffix brings the logits alone."""
    prompt = prompt_of(150)
    held = {"full": 0, "half": 75, "empty": 150}[suffix]
    engine = load(*make_configs(tmp_path, "tiny:gemma3")).prefill.engine
    geometry = engine.identity().geometry
    required = geometry.required(held, len(prompt))
    first_tokens = tuple(tokens.start for tokens in required)

    result, sealed, slot = crossed(DenseEngine(engine), geometry, prompt, first_tokens)
    with_windows, same, same_slot = crossed(engine, geometry, prompt, first_tokens)

    assert (result.totals, result.logits, slot) == (with_windows.totals, with_windows.logits, same_slot)
    assert [one.digest for one in sealed] == [one.digest for one in same]
    cells = [group.num_layers * len(tokens) for group, tokens in zip(geometry.groups, required, strict=True)]
    assert [total.layer_tokens for total in result.totals] == cells
    whole, _, _ = crossed(engine, geometry, prompt, tuple(t.start for t in geometry.required(0, 150)))
    assert result.logits == whole.logits


@pytest.mark.parametrize("model", ["tiny:llama", "tiny:gemma3"])
async def test_n10_an_engine_of_float32_serves_a_cache_of_bfloat16(
    model: str, tmp_path: Path, load: LoadPair
) -> None:
    """N10: the copy into the slot makes bfloat16 of it in every mode, and the answer names the engine."""
    prefill, decode = make_configs(tmp_path, model, numerics=NumericsPolicy.DECLARED)
    decode = replace(decode, dtype="bfloat16")
    async with running_pair(prefill, decode, load(prefill, decode)) as pair:
        found = {mode: await answers(pair, mode) for mode in MODES}
        remote, local = [await pair.ask(prompt_of(65), 1, route=route) for route in ("remote", "local")]
        noted = {difference.field for difference in (await pair.client.status()).peers[0].differences}

    assert found == dict.fromkeys(MODES, found["whole"])
    assert "dtype float32" in remote.prefill_engine.numerics
    assert "dtype bfloat16" in local.prefill_engine.numerics
    assert {"numerics.engine", "geometry.layers[0].dtype", "fingerprint.weights"} <= noted


@pytest.mark.parametrize(("policy", "is_answered"), [("fail", False), ("retry", False), ("local", True)])
async def test_auto_takes_no_other_engine_unless_the_operator_says_so(
    policy: str, is_answered: bool, tmp_path: Path, load: LoadPair
) -> None:
    """Without a session `auto` says so; route `local` is obeyed, and its answer names the engine."""
    configs = make_configs(tmp_path, numerics=NumericsPolicy.DECLARED, on_prefill_loss=policy)
    decode = replace(configs[1], prefill=(f"unix:{tmp_path}/nobody.sock",))
    async with (
        running_decode(decode, load(*configs).decode) as (_, address),
        AsyncClient(address) as client,
    ):
        local = await client.complete(token_ids=prompt_of(9), max_new_tokens=2, route="local")
        found: tuple[int, ...] | str
        try:
            found = (await client.complete(token_ids=prompt_of(9), max_new_tokens=2, route="auto")).token_ids
        except RemoteFailure as failure:
            found = failure.reason

    assert found == (local.token_ids if is_answered else "PREFILL_UNAVAILABLE")
    assert local.prefill_engine.name == "torch"
