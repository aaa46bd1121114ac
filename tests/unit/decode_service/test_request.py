"""What a request may ask of its sampling."""

from __future__ import annotations

import math

import pytest

from decode_service.request import SamplingParams, sampling_violations


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_check_names_the_field_that_is_out_of_range(field: str, value: float) -> None:
    """One wrong field gives one violation with its name."""
    violations = sampling_violations(SamplingParams(**{field: value}))  # type: ignore[arg-type]

    assert [violation.field for violation in violations] == [field]


def test_check_lists_every_violation() -> None:
    """A client learns all at once."""
    violations = sampling_violations(SamplingParams(temperature=-1, top_p=0, logprobs=99))

    assert [violation.field for violation in violations] == ["temperature", "top_p", "logprobs"]


def test_check_accepts_the_limits() -> None:
    """The ends of every range are inside."""
    assert not sampling_violations(SamplingParams(1, 0.0, 0, 1.0, 0.0, 1e-3, 0, 0))
    assert not sampling_violations(SamplingParams(10**6, 9.0, 10**6, 1e-9, 1.0, 99.0, 2**63 - 1, 20))
