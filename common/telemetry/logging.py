"""How a service writes its log: one line per event, to standard error, as text or as JSON.

Theory of operation: the message of a record is the name of an event (`noun.past_verb`) and its values are
fields, `logger.info("span.sealed", extra=log_fields(slot=7))`; no value is ever part of the message, so a
line can be searched by event and parsed by field. Both formats hold time (UTC), level, service and event.

Not here: the journal that an auditor trusts (`journal.py`). Prompts and token text are never logged.
"""

from __future__ import annotations

import json as json_format
import logging
import math
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TextIO

from common.excerpt import excerpt, visible

FIELDS = "fields"
"""Attribute of a record that holds its fields."""

LONGEST_VALUE = 32 << 10
"""Characters of one value: the longest of ours lists all in which two services differ."""

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/+,@%[]()")
"""Characters of a value that needs no quotes."""


request_of_call: ContextVar[str] = ContextVar("request_of_call", default="")
"""Name of the request that the call of this task is about, once it has one. Whoever ends a call knows its
error alone; with this its line and its status have the same name as all lines about the request."""


def log_fields(**values: object) -> dict[str, object]:
    """Return the `extra` of a log call that carries `values` as fields."""
    return {FIELDS: values}


def configure_logging(
    service: str, level: str = "INFO", *, json: bool = False, stream: TextIO | None = None
) -> None:
    """Send every record of `level` and above to `stream`, by default standard error, and nowhere else.

    Called once by each command before it starts anything; a second call replaces the first.

    Raises: `ValueError` when `level` is not the name of a level.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JSONFormatter(service) if json else TextFormatter(service))
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.handlers[:] = [handler]


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields = record.__dict__.get(FIELDS)
    return {name: _cut(value) for name, value in fields.items()} if isinstance(fields, Mapping) else {}


def _cut(value: object) -> object:
    """Return a value, of a text at most LONGEST_VALUE characters: clients and peers choose some of them."""
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no such number.
        return str(value)
    return excerpt(str(value), LONGEST_VALUE) if isinstance(value, str | BaseException) else value


def _timestamp(record: logging.LogRecord) -> str:
    """Return the time of a record in UTC with milliseconds, ISO 8601."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


class TextFormatter(logging.Formatter):
    """Formats a record as `time level service event key=value …`, then its traceback."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        fields = [f"{name}={_text(value)}" for name, value in _fields(record).items()]
        head = [_timestamp(record), record.levelname, self._service, record.getMessage(), *fields]
        lines = [" ".join(head)]
        if record.exc_info:
            lines.append(visible(self.formatException(record.exc_info)))
        return "\n".join(lines)


class JSONFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record; fields stand beside the fixed keys, which win."""
        line = {
            **_fields(record),
            "time": _timestamp(record),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json_format.dumps(line, default=str)


def _text(value: object) -> str:
    """Return a value so that a space or a line break in it cannot end it."""
    plain = str(value)
    if plain and _PLAIN.issuperset(plain):
        return plain
    # JSON escapes some of these characters, not those above ASCII that begin a sequence, a line or turn text.
    return visible(json_format.dumps(plain, ensure_ascii=False))
