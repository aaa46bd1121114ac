"""Which sequences are in the batch: the rules of the step loop, without its thread and without tensors.

Theory of operation: a lane is *active* from `join` until an event of it is its last. A round is `plan`, a
forward over the steps it returns, then `complete` with one row of logits for each of them, or `fail`:

    join --> [active, in order of joining] -- plan --> steps --> complete, fail
                 '-- drop_cancelled, close

A lane that cannot take its part fails alone; a failing forward fails all that were in it (rule 8). A first
token comes from the handed-over logits, so a request for one token never becomes active.

Ownership: used by one thread at a time. Not here: when a round begins, and who is told (`step_loop.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from common.errors import Cancelled, EngineFailed, InvariantViolation, KVSpanError, told

if TYPE_CHECKING:
    from common.engine.decode import LaneStep
    from common.engine.prefill import Logits
    from decode_service.generate.answer import TokenEvent


class Lane(Protocol):
    """What is scheduled."""

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for its tokens any more."""

    def first(self) -> TokenEvent:
        """Return its first token; called once, before every other method."""

    def lane_step(self) -> LaneStep:
        """Return its part of the next step."""

    def accept(self, logits_V: Logits) -> TokenEvent:
        """Take the row that the step computed for it."""


AnyLane = TypeVar("AnyLane", bound=Lane)


@dataclass(frozen=True, slots=True)
class Event(Generic[AnyLane]):
    """What happened to one lane."""

    lane: AnyLane
    what: TokenEvent | KVSpanError

    cause: BaseException | None = None
    """What made this lane alone fail, for the log."""

    @property
    def is_last(self) -> bool:
        """Whether the lane has left the batch, or never came into it."""
        return isinstance(self.what, KVSpanError) or self.what.finish is not None


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counts of the batch."""

    num_active: int
    """Lanes in the batch now."""

    num_steps: int
    num_tokens: int
    """Tokens generated since start."""


class Scheduler(Generic[AnyLane]):
    """The lanes of the batch."""

    def __init__(self) -> None:
        self._active: list[AnyLane] = []
        # Invariant: no lane twice; no lane of which an event was its last.
        self._num_steps = 0
        self._num_tokens = 0

    @property
    def num_active(self) -> int:
        """Lanes in the batch now."""
        return len(self._active)

    def statistics(self) -> SchedulerStatistics:
        """Return the counts now."""
        return SchedulerStatistics(len(self._active), self._num_steps, self._num_tokens)

    def check_integrity(self) -> None:
        """Raise `InvariantViolation` when a lane is in the batch twice: a step would write its row twice."""
        if len(set(map(id, self._active))) != len(self._active):
            raise InvariantViolation(f"a lane is twice among the {len(self._active)} active")

    def join(self, lane: AnyLane) -> Event[AnyLane]:
        """Take the first token of a lane, which is active from the next step on unless that was its last."""
        # A client may have left between publication and now: then not even a token is sampled.
        event = _cancelled(lane) if lane.is_cancelled else self._take(lane, lane.first)
        if not event.is_last:
            self._active.append(lane)
        return event

    def drop_cancelled(self) -> list[Event[AnyLane]]:
        """Take the lanes out whose clients have left."""
        return self._leave([_cancelled(lane) for lane in self._active if lane.is_cancelled])

    def plan(self) -> tuple[list[LaneStep], list[Event[AnyLane]]]:
        """Return the parts of the next step, one for each lane still active, and the ends of the others."""
        steps: list[LaneStep] = []
        failures: list[Event[AnyLane]] = []
        for lane in self._active:
            try:
                steps.append(lane.lane_step())
            except BaseException as error:  # noqa: BLE001 - a lane without a part of the step fails alone
                failures.append(_failed(lane, "lane", error))
        return steps, self._leave(failures)

    def complete(self, rows: Sequence[Logits] | Logits) -> list[Event[AnyLane]]:
        """Take the rows that the step of the last `plan` computed, in its order."""
        self._num_steps += 1
        events = [
            self._take(lane, partial(lane.accept, rows[index])) for index, lane in enumerate(self._active)
        ]
        self._leave([event for event in events if event.is_last])
        return events

    def fail(self, error: BaseException) -> list[Event[AnyLane]]:
        """Take out all lanes of the last `plan`, whose step raised: their KV is undefined."""
        failure = EngineFailed(f"decode step: {told(error)}")
        return self._leave([Event(lane, failure) for lane in self._active])

    def close(self, reason: KVSpanError) -> list[Event[AnyLane]]:
        """Take out every lane: the service ends."""
        return self._leave([Event(lane, reason) for lane in self._active])

    def _take(self, lane: AnyLane, sample: Callable[[], TokenEvent]) -> Event[AnyLane]:
        try:
            token = sample()
        except BaseException as error:  # noqa: BLE001 - so does a panic of the tokenizer
            return _failed(lane, "sampling", error)
        self._num_tokens += 1
        return Event(lane, token)

    def _leave(self, ends: list[Event[AnyLane]]) -> list[Event[AnyLane]]:
        gone = {id(event.lane) for event in ends}
        self._active = [lane for lane in self._active if id(lane) not in gone]
        return ends


def _cancelled(lane: AnyLane) -> Event[AnyLane]:
    return Event(lane, Cancelled("by the client"))


def _failed(lane: AnyLane, part: str, error: BaseException) -> Event[AnyLane]:
    return Event(lane, EngineFailed(f"{part}: {told(error)}"), error)
