"""Engines and messages under a test's control: what a slow, broken or lying producer does.

Theory of operation: a gate is closed until the test opens it; the engine's thread waits on it, no one sleeps.
Wrappers stand around the real engine, so that everything else is what runs in service.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from common.engine.identity import EngineIdentity
from common.engine.prefill import EngineDescription, Logits, PrefillEngine, Wanted
from common.kv.ranges import Range
from common.kv.writer import KVWriter, Rows
from common.session.messages import PrefillMessage
from common.wire.convert import to_proto
from kvspan.v1 import transfer_pb2
from prefill_service import servicer
from prefill_service.app import Loaded
from tests.support.pair import WAIT_S, LoadedPair


class Gate:
    """Lets one waiting thread pass per permit; `open` lets all pass for good. Counts who has come to it."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self._num_arrived = 0

    @property
    def num_arrived(self) -> int:
        """Threads that have come to the gate, passed or not."""
        return self._num_arrived

    def let_pass(self, count: int = 1) -> None:
        """Let so many threads pass, now or later."""
        self._permits.release(count)

    def open(self) -> None:
        """Let everybody pass from now on."""
        self._is_open = True
        self._permits.release(1000)

    def wait(self) -> None:
        """Wait for a permit; on the thread that is to be held up."""
        self._num_arrived += 1
        if not self._is_open and not self._permits.acquire(timeout=WAIT_S):
            raise TimeoutError("the test never opened the gate")


Prefill = Callable[[list[int], Wanted, KVWriter, Callable[[], bool]], Logits]


@dataclass(slots=True)
class WrappedEngine:
    """An engine whose `prefill` is replaced; `inner` is the real one."""

    inner: PrefillEngine
    run: Callable[[PrefillEngine], Prefill]
    """Returns what is called in the place of the inner engine's `prefill`."""

    def identity(self) -> EngineIdentity:
        """Return the checkpoint of the inner engine."""
        return self.inner.identity()

    def describe(self) -> EngineDescription:
        """Return what the inner engine imposes."""
        return self.inner.describe()

    def prefill(
        self, token_ids: list[int], wanted: Wanted, writer: KVWriter, is_cancelled: Callable[[], bool]
    ) -> Logits:
        """Call the replacement."""
        return self.run(self.inner)(token_ids, wanted, writer, is_cancelled)


@dataclass(slots=True)
class GatedWriter:
    """Waits at the gate before the first rows of every chunk."""

    inner: KVWriter
    gate: Gate
    chunk: Range = field(default_factory=lambda: Range(0, 0))

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Pass rows on, after the gate when a chunk begins."""
        if tokens != self.chunk:
            self.chunk = tokens
            self.gate.wait()
        self.inner.write(layer_index, tokens, keys, values)


def gated(loaded: LoadedPair, gate: Gate) -> LoadedPair:
    """Return the pair with a prefill engine that waits at `gate` before every chunk's first rows."""
    return with_engine(
        loaded,
        lambda inner: (
            lambda tokens, wanted, writer, cancelled: inner.prefill(
                tokens, wanted, GatedWriter(writer, gate), cancelled
            )
        ),
    )


def gated_at_end(loaded: LoadedPair, gate: Gate) -> LoadedPair:
    """Return the pair with a prefill engine that has written everything and then waits before it ends."""

    def run(inner: PrefillEngine) -> Prefill:
        def prefill(
            tokens: list[int], wanted: Wanted, writer: KVWriter, cancelled: Callable[[], bool]
        ) -> Logits:
            logits = inner.prefill(tokens, wanted, writer, cancelled)
            gate.wait()
            return logits

        return prefill

    return with_engine(loaded, run)


def failing(loaded: LoadedPair, error: Exception, *, prompt_len: int) -> LoadedPair:
    """Return the pair with a prefill engine that raises for prompts of one length, and works for others."""

    def run(inner: PrefillEngine) -> Prefill:
        def prefill(
            tokens: list[int], wanted: Wanted, writer: KVWriter, cancelled: Callable[[], bool]
        ) -> Logits:
            if len(tokens) == prompt_len:
                raise error
            return inner.prefill(tokens, wanted, writer, cancelled)

        return prefill

    return with_engine(loaded, run)


def with_engine(loaded: LoadedPair, run: Callable[[PrefillEngine], Prefill]) -> LoadedPair:
    """Return the pair with its prefill engine wrapped."""
    prefill: Loaded = replace(loaded.prefill, engine=WrappedEngine(loaded.prefill.engine, run))
    return LoadedPair(prefill, loaded.decode)


def lying(patch: pytest.MonkeyPatch, lie: Callable[[transfer_pb2.KVSpan], None]) -> None:
    """Let prefill services tell each span after `lie` has changed its message."""

    def told(message: PrefillMessage) -> transfer_pb2.TransferResponse:
        response = to_proto(message)
        if response.HasField("kv_span"):
            lie(response.kv_span)
        return response

    patch.setattr(servicer, "to_proto", told)
