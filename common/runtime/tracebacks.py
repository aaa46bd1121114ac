"""Lets go of what an exception holds once it has been dealt with.

Theory of operation: an exception holds the frames it passed, and these hold what they worked on. When one of
them also holds the exception, as the frame that awaits a future does, nothing of it is freed before the
collector finds the circle, which takes long where objects are few and large.
"""

from __future__ import annotations


def drop_tracebacks(error: BaseException) -> None:
    """Drop the frames of an exception, of those that it was raised from and of those in its group.

    Nobody can print where it was raised afterwards: log it first. Its frames are left alone, as another
    exception may pass through them still.
    """
    seen: set[int] = set()
    found = [error]
    while found:
        one = found.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        found += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            found += one.exceptions
