"""How the counts that both services keep of themselves read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvspan.commands.values import rounded_size

if TYPE_CHECKING:
    from kvspan.v1.decode_pb2 import GetStatusResponse
    from kvspan.v1.transfer_pb2 import PrefillServiceGetStatusResponse


def own_lines(status: GetStatusResponse | PrefillServiceGetStatusResponse) -> Iterator[str]:
    """Yield what became of calls that did not end as they should, and the journal when there is one."""
    calls = status.calls
    if counts := unusual((calls.exhausted, "refused unread"), (calls.broken, "broke")):
        yield f"calls: {counts.removeprefix(', ')}"
    if status.HasField("journal"):
        journal = status.journal
        written = f"{journal.num_lines} lines, {rounded_size(journal.num_bytes)}"
        yield f"journal: {written}{', LOST: nothing is written any more' if journal.is_lost else ''}"


def unusual(*counts: tuple[int, str]) -> str:
    """Return counts that are zero as long as all is well, each behind a comma; nothing of those that are."""
    return "".join(f", {count} {name}" for count, name in counts if count)
