"""Tests of `common/wire/library_log.py`."""

from __future__ import annotations

import logging

import pytest

from common.wire.library_log import LOGGER, quiet_meetings


@pytest.mark.parametrize(
    ("text", "num_lines"),
    [
        ("ExecuteBatchError raised in core by servicer method [/kvspan.v1.DecodeService/Generate]", 0),
        ("Unexpected [KeyError] raised by servicer method [/kvspan.v1.DecodeService/Generate]", 1),
    ],
)
def test_only_the_meeting_of_two_ends_is_left_out(
    text: str, num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A status that cannot be sent to a client that left is no error; all else is logged as before."""
    quiet_meetings()

    logging.getLogger(LOGGER).error(text)

    assert len(caplog.records) == num_lines
