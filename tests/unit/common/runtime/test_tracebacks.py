"""Tests of `common/runtime/tracebacks.py`."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from common.runtime.tracebacks import drop_tracebacks


class Held:
    """What a frame works on."""


def fail(held: Held) -> None:
    """Raise one error from another."""
    try:
        raise KeyError("first")
    except KeyError as error:
        raise ValueError("second") from error


async def test_what_a_frame_held_is_free_although_a_future_there_holds_its_error() -> None:
    """Without a collector: it may come a gigabyte later."""
    references: list[weakref.ref[Held]] = []

    async def wait() -> None:
        held, outcome = Held(), asyncio.get_running_loop().create_future()
        references.append(weakref.ref(held))
        outcome.set_exception(KeyError("reason"))
        await outcome

    gc.disable()
    try:
        try:
            await wait()
        except KeyError as error:
            drop_tracebacks(error)
        assert [reference() for reference in references] == [None]
    finally:
        gc.enable()


def test_causes_and_members_of_groups_let_go_too() -> None:
    """Whatever an error was raised from passed frames of its own."""
    with pytest.raises(ValueError, match="second") as caught:
        fail(Held())
    error, cause = caught.value, caught.value.__cause__

    drop_tracebacks(BaseExceptionGroup("all", [error]))

    assert cause is not None
    assert (error.__traceback__, cause.__traceback__) == (None, None)


def test_errors_that_name_each_other_are_no_trap() -> None:
    """A cause may be its own effect's cause."""
    first, second = KeyError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first

    drop_tracebacks(first)

    assert first.__cause__ is second
