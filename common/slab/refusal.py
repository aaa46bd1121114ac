"""What a peer is told whose slab is not taken."""

from __future__ import annotations

from common.errors import Difference, SlabNotShared


def not_shared(field: str, decode_value: str, prefill_value: str) -> SlabNotShared:
    """Return a refusal that reads the same in every run: no random name, no path, no momentary count."""
    return SlabNotShared([Difference(field, decode_value, prefill_value)])
