"""Points inside a running service at which the driver makes a fault strike, without a sleep anywhere.

Theory of operation: a service passes its gates on every request; a gate that is not armed costs a lookup. The
driver arms one over the control socket and says what the pass number `skip` (from 0) shall do; it is told
`armed` at once and `at` when that pass happens. An armed gate acts once.

    hold      wait until the driver opens the gate
    raise, oom, exit      raise RuntimeError, MemoryError, SystemExit
    corrupt   return the action to the caller, which alters the bytes it is about to use
    note      only tell

    prefill   hello, start   on the event loop, before such a message is taken
              write, seal    on the engine's thread, before each layer of a chunk, before each sealed span
              written, sealed  after the last layer; after the last span, before PrefillDone
    decode    import, copy   on the importing thread, before each span is checked, before it is copied
              step           on the step loop's thread, before each step
              done           on the event loop, after PrefillDone was taken

The gates are put around methods of the classes; all that stands between them is what runs in service.

Ownership: one `Gates` per process; its reading thread ends with the process.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.kv.spans import Span
from common.session.messages import Hello, PrefillDone, StartPrefill
from common.session.prefill_states import PrefillState
from decode_service.app import DecodeService
from decode_service.generate.backends.torch_backend import TorchBackend
from decode_service.prefill.importer import Importer, ImportJob
from decode_service.prefill.peer_session import PeerSession
from prefill_service.app import PrefillService
from prefill_service.decode_peer import DecodePeer
from prefill_service.span_writer import SpanWriter

HOLD_LIMIT_S = 60.0
"""Longest hold; the driver opens a gate within seconds."""

ERRORS: Mapping[str, Callable[[str], BaseException]] = {
    "raise": RuntimeError,
    "oom": MemoryError,
    "exit": SystemExit,
}


@dataclass(slots=True)
class _Order:
    action: str
    skip: int


class Gates:
    """The gates of one process, and its line to the driver."""

    def __init__(self, control: str, name: str) -> None:
        """Connect to the driver's socket `control` and begin to listen."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(control)
        self._lock = threading.Lock()
        self._orders: dict[str, _Order] = {}
        self._opened: dict[str, threading.Event] = {}
        self.count: Callable[[], None] = lambda: None
        """Called when the driver asks for the counts of the service."""

        self.say(name=name)
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def say(self, **message: object) -> None:
        """Tell the driver something."""
        with self._lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def arm(self, point: str, action: str, skip: int = 0) -> None:
        """Let a later pass of `point` do `action`; whoever waits there now goes on."""
        before = self._opened.get(point)
        self._opened[point] = threading.Event()
        self._orders[point] = _Order(action, skip)
        if before is not None:
            before.set()

    def pass_(self, point: str) -> str:
        """Pass a gate; returns what was ordered for this pass, or nothing."""
        order = self._orders.get(point)
        if order is None:
            return ""
        if order.skip:
            order.skip -= 1
            return ""
        opened = self._opened[point]
        del self._orders[point]
        self.say(at=point)
        if order.action == "hold" and not opened.wait(HOLD_LIMIT_S):
            raise TimeoutError(f"the driver never opened {point}")
        if order.action in ERRORS:
            raise ERRORS[order.action](f"ordered at {point}")
        return order.action

    def _listen(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                order = json.loads(line)
                match order.pop("do"):
                    case "arm":
                        self.arm(**order)
                        self.say(armed=order["point"])
                    case "open":
                        self._orders.pop(order["point"], None)
                        if order["point"] in self._opened:
                            self._opened[order["point"]].set()
                    case "count":
                        self.count()


def install_prefill(gates: Gates) -> None:
    """Put gates into the prefill service of this process."""

    def gate_seal(writer: SpanWriter, plan: Any, target: Any, *rest: Any) -> tuple[Any, ...]:
        def seal(span: Span) -> None:
            gates.pass_("seal")
            target.seal(span)

        return (plan, replace(target, seal=seal), *rest)

    def take(peer: DecodePeer, message: object) -> None:
        if isinstance(message, Hello | StartPrefill):
            gates.pass_("hello" if isinstance(message, Hello) else "start")

    _before(SpanWriter, "__init__", gate_seal)
    _before(SpanWriter, "write", lambda *_: gates.pass_("write"))
    _before(SpanWriter, "finish", lambda *_: gates.pass_("written"))
    _after(SpanWriter, "finish", lambda *_: gates.pass_("sealed"))
    _before(DecodePeer, "receive", take)
    _after(PrefillService, "__init__", lambda service, *_: _answer(gates, lambda: _prefill_counts(service)))


def install_decode(gates: Gates) -> None:
    """Put gates into the decode service of this process."""

    def check(importer: Importer, job: ImportJob) -> None:
        if gates.pass_("import") == "corrupt":
            job.source[len(job.source) // 2] ^= 1

    def took(session: PeerSession, message: object) -> None:
        if isinstance(message, PrefillDone):
            gates.pass_("done")

    _before(Importer, "_import", check)
    _before(Importer, "_copy", lambda *_: gates.pass_("copy"))
    _before(TorchBackend, "step", lambda *_: gates.pass_("step"))
    _after(PeerSession, "receive", took)
    _after(DecodeService, "__init__", lambda service, *_: _answer(gates, lambda: _decode_counts(service)))


def _prefill_counts(service: PrefillService) -> dict[str, int]:
    peers = service.servicer.peers
    for peer in peers:
        peer.check_integrity()
    counts = [peer.statistics() for peer in peers]
    return {
        "sessions": len(peers),
        "open": sum(count.state in (PrefillState.OPEN, PrefillState.LEAVING) for count in counts),
        "jobs": sum(count.num_jobs for count in counts),
        "pinned": sum(count.pinned_bytes for count in counts),
    }


def _decode_counts(service: DecodeService) -> dict[str, int]:
    service.core.check_integrity()
    return {"live": service.core.counts.live, "retried": service.core.counts.retried}


def _answer(gates: Gates, count: Callable[[], dict[str, int]]) -> None:
    """Let the driver have counts, taken on the event loop together with those of the process."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        # What only waits to be collected holds nothing; grpc leaves its calls in cycles.
        gc.collect()
        gates.say(counts={**count(), "threads": _num_threads()})

    def ask() -> None:
        loop.call_soon_threadsafe(tell)

    gates.count = ask


def _before(kind: type, name: str, act: Callable[..., Any]) -> None:
    """Call `act` with the arguments of a method before it; a tuple that it returns takes their place."""
    method = getattr(kind, name)

    def wrapped(self: object, *arguments: Any, **named: Any) -> Any:
        changed = act(self, *arguments, **named)
        return method(self, *(changed if isinstance(changed, tuple) else arguments), **named)

    setattr(kind, name, wrapped)


def _after(kind: type, name: str, act: Callable[..., Any]) -> None:
    """Call `act` with the arguments of a method after it."""
    method = getattr(kind, name)

    def wrapped(self: object, *arguments: Any, **named: Any) -> Any:
        result = method(self, *arguments, **named)
        act(self, *arguments, **named)
        return result

    setattr(kind, name, wrapped)


def _num_threads() -> int:
    """Return the number of threads but those of asyncio's executor, which makes them as it needs."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())
