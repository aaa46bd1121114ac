"""What the decode service allocates at start is looked at before it is taken."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from decode_service.app import load
from decode_service.config import DecodeConfig


def test_cache_that_cannot_fit_into_memory_is_refused_with_both_sizes() -> None:
    """All of it is touched at start: without this the kernel would kill the process, or another one."""
    config = DecodeConfig(
        model="tiny:llama", listen="unix:/a", dtype="float32", threads=1, cache_tokens=1 << 34
    )

    with pytest.raises(
        ConfigError, match=r"^cache_tokens=17179869184: the cache takes \d+ MiB of memory, \d+"
    ):
        load(config)
