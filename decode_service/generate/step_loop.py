"""Decodes: the thread that turns the batch of the scheduler into steps of the backend.

Theory of operation: between two steps the thread takes new sequences and drops cancelled ones; with no lane
active it sleeps on its queue. Each step posts all its events to the event loop in one call.

    inbox --> [scheduler] --step--> events --> event loop

Ownership: one per service; owns the thread. A sequence belongs to this thread from `start` until
`Sequence.retire` has been called on the event loop. Not here: which lanes are active and what ends them
(`scheduler.py`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from queue import Empty, SimpleQueue

from common.engine.decode import DecodeBackend
from common.errors import Cancelled, InvariantViolation
from common.runtime.invariants import raise_break, raise_on
from common.telemetry.logging import log_fields
from decode_service.generate.scheduler import Event, Scheduler, SchedulerStatistics
from decode_service.generate.sequence import Sequence

logger = logging.getLogger(__name__)


class StepLoop:
    """The decoding thread."""

    def __init__(self, backend: DecodeBackend) -> None:
        """Start the thread."""
        self._backend = backend
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[Sequence | None] = SimpleQueue()
        self._scheduler: Scheduler[Sequence] = Scheduler()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._thread.start()

    def start(self, sequence: Sequence) -> None:
        """Take a published sequence into the batch before the next step."""
        self._inbox.put(sequence)

    def stop(self) -> None:
        """End the thread after the current step; blocks until then. Active sequences are retired."""
        self._inbox.put(None)
        self._thread.join()

    def statistics(self) -> SchedulerStatistics:
        """Return the counts now."""
        return self._scheduler.statistics()

    def _run(self) -> None:
        try:
            self._decode()
        except BaseException as error:  # noqa: BLE001 - nobody else sees how a thread ends
            raise_break(self._loop, "step loop", error)

    def _decode(self) -> None:
        is_stopping = False
        while not is_stopping:
            events, is_stopping = self._take_new()
            if not is_stopping:
                events += self._scheduler.drop_cancelled()
                events += self._step()
            self._post(events)
            del events  # this thread may sleep now for long: nothing of what has ended may stay with it
        self._post(self._scheduler.close(Cancelled("the decode service is shutting down")))

    def _take_new(self) -> tuple[list[Event[Sequence]], bool]:
        """Take everything from the inbox, and tell whether to stop; sleep for it when no lane is active."""
        events: list[Event[Sequence]] = []
        is_waiting = not self._scheduler.num_active
        while True:
            try:
                sequence = self._inbox.get(block=is_waiting)
            except Empty:
                return events, False
            if sequence is None:
                return events, True
            events.append(self._scheduler.join(sequence))
            is_waiting = False

    def _step(self) -> list[Event[Sequence]]:
        steps, events = self._scheduler.plan()
        if not steps:
            return events
        try:
            logits_LV = self._backend.step(steps)
        except BaseException as error:
            failures = self._scheduler.fail(error)
            names = [event.lane.request_id for event in failures]
            logger.exception("step.failed", extra=log_fields(request_ids=names))
            self._report(error)
            return events + failures
        return events + self._scheduler.complete(logits_LV)

    def _report(self, error: BaseException) -> None:
        """Tell the service of a broken invariant; it has to stop."""
        if isinstance(error, InvariantViolation):
            raise_on(self._loop, error)

    def _post(self, events: list[Event[Sequence]]) -> None:
        for event in events:
            if event.cause is not None:
                fields = log_fields(request_id=event.lane.request_id)
                logger.error("lane.failed", extra=fields, exc_info=event.cause)
                self._report(event.cause)
        if events:
            self._loop.call_soon_threadsafe(_deliver, events)


def _deliver(events: list[Event[Sequence]]) -> None:
    for event in events:
        event.lane.deliver(event.what)
        if event.is_last:
            event.lane.retire()
