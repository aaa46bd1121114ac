"""Keeps the library from calling an ordinary meeting of two ends an error.

Theory of operation: a client's deadline and the status of its call may cross. The library finds then that the
status cannot be sent, which changes nothing, as the client has left, and logs that as an error with a
traceback unless it has heard of the client's end already. Every other line of the library is left as it is.
"""

from __future__ import annotations

import logging

LOGGER = "grpc._cython.cygrpc"
"""Where the servers of the library log."""

MEETING = "ExecuteBatchError raised in core by servicer method"
"""How the line begins."""


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Tell whether a line of the library says more than that a client left while it was told its status."""
    return not record.getMessage().startswith(MEETING)


def quiet_meetings() -> None:
    """Leave such lines out from now on; may be called often."""
    logging.getLogger(LOGGER).addFilter(is_worth_a_line)
