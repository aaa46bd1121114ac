"""Tests of common/model/progress.py."""

import pytest
from transformers.utils import logging as transformers_logging

from common.model.progress import shown_progress


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("shown", [True, False])
def test_setting_holds_inside_and_is_put_back(*, before: bool, shown: bool) -> None:
    """The bars are shown or hidden inside the block only, also when the block raises."""
    with shown_progress(before):
        with pytest.raises(KeyError), shown_progress(shown):
            assert transformers_logging.is_progress_bar_enabled() is shown
            raise KeyError

        assert transformers_logging.is_progress_bar_enabled() is before
