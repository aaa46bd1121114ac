"""Where the `kvspan` command begins: with ears for signals, before anything else is imported.

Theory of operation: what commands import takes a part of a second. A signal in that time would be lost where
the process is the first of a container, and end a service with an exit code that means failure anywhere else.

Not here: the commands (`cli.py`).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from common.runtime.lifecycle import EXIT_BY_SIGNAL, SIGNALS, EarlyEnd

EXIT_INTERRUPTED = EXIT_BY_SIGNAL + signal.SIGINT

SERVING = frozenset({"up", "prefill", "decode", "demo"})
"""Commands that are meant to be ended by a signal."""


def main() -> int:
    """Run the command line of this process and return its exit code."""
    line = sys.argv[1:]
    try:
        with early_end(line):
            from kvspan.cli import main

            return main(line)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def early_end(line: Sequence[str]) -> EarlyEnd:
    """Return what takes the signals that come before a service takes them, and those of other commands."""
    if SERVING.isdisjoint(line[:1]):
        # Ctrl-C is a KeyboardInterrupt there, which asyncio knows how to take.
        return EarlyEnd((signal.SIGTERM, signal.SIGHUP))
    return EarlyEnd(SIGNALS, 0)


if __name__ == "__main__":
    sys.exit(main())
