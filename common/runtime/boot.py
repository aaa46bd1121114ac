"""Names one life of a process."""

from __future__ import annotations

import secrets

BOOT_ID_BYTES = 8
"""Random bytes of a boot id: two lives meet with a chance of one in 2**64."""


def new_boot_id() -> str:
    """Return a fresh boot id: lower-case hex, never equal to one of an earlier life."""
    return secrets.token_hex(BOOT_ID_BYTES)
