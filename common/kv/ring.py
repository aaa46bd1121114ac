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
    return sum(_largest_spans(plan))


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
    return max(needed, capacity // 2 // alignment * alignment)


def ring_shares(plan: SpanPlan, slot_size: int) -> tuple[Range, ...]:
    """Return the share of each group, in bytes from the start of the slot; empty for a group without spans.

    What is left above the minimum goes to the groups in proportion to the bytes they have above theirs.
    Shares begin and end at multiples of 64 and hold no more than the group's own bytes.

    Raises: `SpanOutOfRange` when the slot is smaller than `minimum_ring`.
    """
    largest, totals = _largest_spans(plan), _total_bytes(plan)
    minimum = sum(largest)
    if slot_size < minimum:
        raise SpanOutOfRange("slot_size", slot_size, f"at least {minimum}")
    spare, wanted = min(slot_size, plan.total_bytes) - minimum, plan.total_bytes - minimum
    shares = []
    start = 0
    for least, total in zip(largest, totals, strict=True):
        extra = spare * (total - least) // wanted if wanted else 0
        stop = start + least + extra // PART_ALIGNMENT * PART_ALIGNMENT
        shares.append(Range(start, stop))
        start = stop
    return tuple(shares)


def _largest_spans(plan: SpanPlan) -> list[int]:
    """Return the length of the largest span of each group."""
    largest = [0] * _num_groups(plan)
    for chunk in plan.chunks:
        for span in chunk.template:
            largest[span.group_index] = max(largest[span.group_index], span.length)
    return largest


def _total_bytes(plan: SpanPlan) -> list[int]:
    """Return the bytes of all spans of each group."""
    totals = [0] * _num_groups(plan)
    for chunk in plan.chunks:
        for span in chunk.template:
            totals[span.group_index] += span.length
    return totals


def _num_groups(plan: SpanPlan) -> int:
    """Return one more than the highest group that has a span."""
    return max((span.group_index + 1 for chunk in plan.chunks for span in chunk.template), default=0)
