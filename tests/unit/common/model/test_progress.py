"""Tests of common/model/progress.py."""

import pytest
from transformers.utils import logging as transformers_logging

from common.model.progress import shown_progress


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("shown", [True, False])
def test_setting_holds_inside_and_is_put_back(*, before: bool, shown: bool) -> None:
    """The bars are shown or hidden inside the block only."""
    with shown_progress(before):
        with shown_progress(shown):
            inside = transformers_logging.is_progress_bar_enabled()
        after = transformers_logging.is_progress_bar_enabled()

    assert (inside, after) == (shown, before)
