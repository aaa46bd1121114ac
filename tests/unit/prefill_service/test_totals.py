"""Counts of a prefill service that outlive its sessions."""

from typing import Any

import pytest

from common.errors import InvariantViolation
from prefill_service.totals import Totals

ENDS: dict[str, Any] = {"done": 2, "failed": 3, "cancelled": 5, "expired": 7, "abandoned": 11}


def test_transfers_that_live_and_that_have_ended_are_those_accepted() -> None:
    """A refused one was never accepted."""
    Totals(accepted=28 + 13, refused=17, **ENDS).check_integrity(13)


@pytest.mark.parametrize("end", ENDS)
def test_a_transfer_that_ended_twice_is_found(end: str) -> None:
    """Whatever its second end was."""
    totals = Totals(accepted=28 + 13, **{**ENDS, end: ENDS[end] + 1})

    with pytest.raises(InvariantViolation, match="41 accepted, 29 ended and 13 live"):
        totals.check_integrity(13)
