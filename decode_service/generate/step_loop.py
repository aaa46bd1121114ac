"""Decodes: one thread, one step after another over the active lanes.

Theory of operation: between two steps the thread takes new sequences and drops cancelled ones; with no lane
active it sleeps on its queue. A sequence's first token comes from the handed-over logits, so a request for
one token costs no step. Each step posts all its events to the event loop in one call.

    inbox --> [active lanes] --step--> events --> event loop

A failing step fails the lanes that were in it, a failing sample fails its lane alone; the loop goes on.

Ownership: one per service; owns the thread. A sequence belongs to this thread from `start` until
`Sequence.retire` has been called on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from common.errors import Cancelled, EngineFailed, InvariantViolation, KVSpanError
from common.runtime.invariants import raise_break
from common.telemetry.logging import log_fields
from decode_service.generate.answer import TokenEvent
from decode_service.generate.backends.base import DecodeBackend, LaneStep
from decode_service.generate.sequence import Sequence

logger = logging.getLogger(__name__)

Event = tuple[Sequence, TokenEvent | KVSpanError, bool]
"""Sequence, what happened, whether the sequence is retired."""


@dataclass(frozen=True, slots=True)
class StepLoopStatistics:
    """Counts of the step loop."""

    num_active: int
    """Lanes in the batch of the last step."""

    num_steps: int
    num_tokens: int
    """Tokens generated since start."""


class StepLoop:
    """The decoding thread."""

    def __init__(
        self, backend: DecodeBackend, on_invariant: Callable[[InvariantViolation], None] | None = None
    ) -> None:
        """Start the thread; `on_invariant` is called on the event loop when a bug of ours shows."""
        self._backend = backend
        self._on_invariant = on_invariant
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[Sequence | None] = SimpleQueue()
        self._active: list[Sequence] = []
        self._is_stopping = False
        self._num_steps = 0
        self._num_tokens = 0
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._thread.start()

    def start(self, sequence: Sequence) -> None:
        """Take a published sequence into the batch before the next step."""
        self._inbox.put(sequence)

    def stop(self) -> None:
        """End the thread after the current step; blocks until then. Active sequences are retired."""
        self._inbox.put(None)
        self._thread.join()

    def statistics(self) -> StepLoopStatistics:
        """Return the counts now."""
        return StepLoopStatistics(len(self._active), self._num_steps, self._num_tokens)

    def _run(self) -> None:
        try:
            self._decode()
        except Exception as error:  # noqa: BLE001 - nobody else sees how a thread ends
            raise_break(self._loop, "step loop", error)

    def _decode(self) -> None:
        while True:
            events = self._take_new()
            if self._is_stopping:
                break
            events += self._drop_cancelled()
            if self._active:
                events += self._step()
            self._post(events)
        stopped = Cancelled("the decode service is shutting down")
        self._post(events + [(sequence, stopped, True) for sequence in self._active])

    def _take_new(self) -> list[Event]:
        """Take everything from the inbox; sleep for it when no lane is active."""
        events: list[Event] = []
        is_waiting = not self._active
        while True:
            try:
                sequence = self._inbox.get(block=is_waiting)
            except Empty:
                return events
            if sequence is None:
                self._is_stopping = True
                return events
            events.append(self._advance(sequence, sequence.first))
            is_waiting = False
            if not events[-1][2]:
                self._active.append(sequence)

    def _drop_cancelled(self) -> list[Event]:
        dropped = [sequence for sequence in self._active if sequence.is_cancelled]
        self._active = [sequence for sequence in self._active if not sequence.is_cancelled]
        return [(sequence, Cancelled("by the client"), True) for sequence in dropped]

    def _step(self) -> list[Event]:
        lanes, steps, events = self._prepare()
        if not lanes:
            return events
        try:
            logits_LV = self._backend.step(steps)
        except Exception as error:
            logger.exception("step.failed", extra=log_fields(lanes=len(lanes)))
            self._report(error)
            failure = EngineFailed(f"decode step: {type(error).__name__}: {error}")
            self._active = []
            return events + [(lane, failure, True) for lane in lanes]
        self._num_steps += 1
        taken = [self._advance(lane, lane.accept, logits_LV[row]) for row, lane in enumerate(lanes)]
        self._active = [lane for lane, _, is_retired in taken if not is_retired]
        return events + taken

    def _prepare(self) -> tuple[list[Sequence], list[LaneStep], list[Event]]:
        """Return the lanes that can step, their parts of it, and the failures of the others."""
        lanes: list[Sequence] = []
        steps: list[LaneStep] = []
        failures: list[Event] = []
        for lane in self._active:
            try:
                steps.append(lane.lane_step())
                lanes.append(lane)
            except Exception as error:
                logger.exception("lane.failed")
                self._report(error)
                problem = f"lane: {type(error).__name__}: {error}"
                failures.append((lane, EngineFailed(problem), True))
        self._active = lanes
        return lanes, steps, failures

    def _advance(self, lane: Sequence, take: Callable[..., TokenEvent], *logits: object) -> Event:
        try:
            event = take(*logits)
        except Exception as error:
            logger.exception("sampling.failed")
            self._report(error)
            return (lane, EngineFailed(f"sampling: {type(error).__name__}: {error}"), True)
        self._num_tokens += 1
        return (lane, event, event.finish is not None)

    def _report(self, error: Exception) -> None:
        """Tell the service of a broken invariant; it has to stop."""
        if isinstance(error, InvariantViolation) and self._on_invariant is not None:
            self._loop.call_soon_threadsafe(self._on_invariant, error)

    def _post(self, events: list[Event]) -> None:
        if events:
            self._loop.call_soon_threadsafe(_deliver, events)


def _deliver(events: list[Event]) -> None:
    for sequence, event, is_retired in events:
        sequence.deliver(event)
        if is_retired:
            sequence.retire()
