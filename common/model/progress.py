"""What transformers prints while a model loads: its bars if somebody watches, no warnings.

Ownership: the switch is global to transformers; `shown_progress` puts it back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def shown_progress(shown: bool) -> Iterator[None]:
    """Show or hide transformers' progress bars (on stderr) inside the block, where it warns of nothing.

    What matters of its warnings is in what it returns, and is refused by name.
    """
    was_shown, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    _switch(shown)
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        _switch(was_shown)
        transformers_logging.set_verbosity(level)


def _switch(shown: bool) -> None:
    if shown:
        transformers_logging.enable_progress_bar()
    else:
        transformers_logging.disable_progress_bar()
