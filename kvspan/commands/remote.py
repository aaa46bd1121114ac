"""Calls to services: how a status that is not OK reads on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvspan.commands.command import CommandFailed


@contextmanager
def told_failures() -> Iterator[None]:
    """Turn a call that did not end with OK into CommandFailed: code, reason, message, when to try again."""
    from common.wire.failure import RemoteFailure

    try:
        yield
    except RemoteFailure as failure:
        after_s = failure.retry_after_s
        hint = "" if after_s is None else f" (try again in {after_s:g} s)"
        raise CommandFailed(f"{failure}{hint}") from failure
