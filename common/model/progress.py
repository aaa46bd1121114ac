"""Whether transformers shows its progress bars while a model loads.

Ownership: the switch is global to transformers; `shown_progress` puts it back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def shown_progress(shown: bool) -> Iterator[None]:
    """Show or hide transformers' progress bars (on stderr) inside the block."""
    was_shown = transformers_logging.is_progress_bar_enabled()
    _switch(shown)
    try:
        yield
    finally:
        _switch(was_shown)


def _switch(shown: bool) -> None:
    if shown:
        transformers_logging.enable_progress_bar()
    else:
        transformers_logging.disable_progress_bar()
