"""How a prompt whose KV is larger than its slot shares the slot: one part per group, used again and again.

Theory of operation: a slot that holds the whole plan needs no rule; every byte is used once. A smaller one
is a *ring*. It is cut into one share per group, each at least as large as the group's largest span:

    slot    |share of group 0          |share of group 1                          | rest |
            |seal |seal |open|  free   |sealed    |open      |sealed   |   free   |

A group has at most one span that is being filled, since its spans are completed one after another. So when a
span finds no room in its share, everything else in that share is sealed, and comes back when decode has
imported it; then the share is one gap, and the span fits. No group waits for another, and so nothing waits
for ever, whatever the order of releases.

Not here: which bytes of a share are free now (`prefill_service/credit.py`).
"""

from __future__ import annotations

from common.errors import PromptTooLong, SpanOutOfRange
from common.kv.plan import SpanPlan
from common.kv.ranges import Range
from common.kv.spans import PART_ALIGNMENT


def minimum_ring(plan: SpanPlan) -> int:
    """Return the bytes of the smallest slot through which the spans of `plan` can be sealed."""
    return sum(map(max, _span_lengths(plan)))


def slot_bytes(plan: SpanPlan, capacity: int, alignment: int, *, can_reuse: bool) -> int:
    """Return the size of the slot to lease for `plan` in a slab that leases at most `capacity` bytes.

    The whole plan when that can be leased. Otherwise a ring of half the slab, so that two prompts may be
    under way, or what the plan needs at least. `can_reuse` is False when nothing is sealed before the end.

    Raises: `PromptTooLong` when the slab can never hold what is needed.
    """
    if plan.total_bytes <= capacity:
        return plan.total_bytes
    needed = minimum_ring(plan) if can_reuse else plan.total_bytes
    if needed > capacity:
        raise PromptTooLong("slab bytes", needed, capacity)
    # Half of the slab rounded down to what the allocator leases, else a second ring would not fit beside it.
    return max(needed, capacity // 2 // alignment * alignment)


def ring_shares(plan: SpanPlan, slot_size: int) -> tuple[Range, ...]:
    """Return the share of each group, in bytes from the start of the slot; empty for a group without spans.

    What is left above the minimum goes to the groups in proportion to the bytes they have above theirs.
    Shares begin and end at multiples of 64 and hold no more than the group's own bytes.

    Raises: `SpanOutOfRange` when the slot is smaller than `minimum_ring`.
    """
    lengths = _span_lengths(plan)
    largest, totals = list(map(max, lengths)), list(map(sum, lengths))
    minimum = sum(largest)
    if slot_size < minimum:
        raise SpanOutOfRange("slot_size", slot_size, f"at least {minimum}")
    # Invariant: spare <= wanted, so no share is larger than its group: extra <= total - least.
    spare, wanted = min(slot_size, plan.total_bytes) - minimum, plan.total_bytes - minimum
    shares = []
    start = 0
    for least, total in zip(largest, totals, strict=True):
        extra = spare * (total - least) // wanted if wanted else 0
        # Down: what rounding leaves is lost at the end of the slot, and no share reaches beyond it.
        stop = start + least + extra // PART_ALIGNMENT * PART_ALIGNMENT
        shares.append(Range(start, stop))
        start = stop
    return tuple(shares)


def _span_lengths(plan: SpanPlan) -> list[list[int]]:
    """Return the lengths of the spans of each group; [0] for one that has none."""
    lengths: dict[int, list[int]] = {}
    for chunk in plan.chunks:
        for span in chunk.template:
            lengths.setdefault(span.group_index, []).append(span.length)
    return [lengths.get(group_index, [0]) for group_index in range(max(lengths, default=-1) + 1)]
