"""Whatever is lost, nothing else is: the matrix of faults over real processes."""

from __future__ import annotations

import pytest

from tests.faults.cases import Case
from tests.faults.driver import Driver
from tests.faults.hostile import Script
from tests.faults.table import Verdict

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.multiprocess, pytest.mark.slow]


def judge(verdict: Verdict, report: list[Verdict]) -> None:
    """Keep a verdict for the table, and fail when it is not good."""
    report.append(verdict)
    assert verdict.is_good, verdict.text()


async def test_nothing_else_is_lost(case: Case, driver: Driver, report: list[Verdict]) -> None:
    """A fault ends one request with a status, and nothing is held, left, wrong or late afterwards."""
    judge(await driver.play(case), report)


async def test_a_lie_of_a_prefill_service_fails_what_it_is_about(
    script: Script, driver: Driver, report: list[Verdict]
) -> None:
    """One transfer fails with DATA_LOSS, or the session ends; nothing is published, nothing else touched."""
    judge(await driver.play_script(script), report)


async def test_a_prompt_that_never_drains_costs_its_neighbour_nothing(
    driver: Driver, report: list[Verdict]
) -> None:
    """The neighbour is answered, and another session opens beside theirs."""
    judge(await driver.play_undrained(), report)


async def test_an_impostor_is_refused_alone(lie: str, driver: Driver, report: list[Verdict]) -> None:
    """What cannot be served is refused by name, what is not allowed ends the session of who said it."""
    judge(await driver.play_lie(lie), report)


async def test_a_request_of_nonsense_is_refused_with_a_reason(
    nonsense: str, driver: Driver, report: list[Verdict]
) -> None:
    """No bytes of a client break the service, hold anything or harm a neighbour."""
    judge(await driver.play_request(nonsense), report)


async def test_calls_that_are_given_up_leave_nothing(
    num_cancels: int, driver: Driver, report: list[Verdict]
) -> None:
    """However many calls are made and given up, counts are back at zero and memory is bounded."""
    judge(await driver.play_cancels(num_cancels), report)


async def test_calls_that_send_nothing_keep_nobody_out(
    num_silent: int, driver: Driver, report: list[Verdict]
) -> None:
    """However many calls one client opens in silence, another one is answered with its exact tokens."""
    judge(await driver.play_silence(num_silent), report)


async def test_a_crowd_keeps_nobody_out(crowd: str, driver: Driver, report: list[Verdict]) -> None:
    """Whatever is too much, too slow or too greedy, others are answered with their exact tokens."""
    judge(await driver.play_crowd(crowd), report)


async def test_a_slab_for_two_is_used_by_many(num_reuses: int, driver: Driver, report: list[Verdict]) -> None:
    """Each answer is right for its own prompt, whoever gives up beside it; memory stays flat."""
    judge(await driver.play_reuse(num_reuses), report)
