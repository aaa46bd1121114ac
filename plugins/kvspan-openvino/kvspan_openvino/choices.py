"""What can be told to this engine by --engine-option, and how layers are shared out among parts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from common.engine.options import Options
from common.kv.ranges import Range

PRECISIONS = ("f32", "bf16", "f16")
"""In which a device may compute; what leaves it is float32."""

MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class Choices:
    """What the operator chose."""

    widths: tuple[int, ...]
    """Tokens of a pass, ascending; each is compiled by itself."""

    parts: int
    """Groups of layers, each compiled by itself: the KV of one leaves while the next one computes."""

    device: str
    precision: str


def read_choices(options: Options) -> Choices:
    """Return what was chosen; refuses options that there are not.

    Raises: `ConfigError` that names the option.
    """
    choices = Choices(
        widths=options.integers("widths", (256, 1024)),
        parts=options.integer("parts", 3, minimum=1, maximum=MAX_PARTS),
        device=options.text("device", "CPU"),
        precision=options.choice("precision", PRECISIONS, "f32"),
    )
    if not choices.widths:
        raise options.refuse("widths", "at least one width has to be compiled")
    options.close()
    return choices


def share_out(num_layers: int, parts: int) -> tuple[Range, ...]:
    """Return the layers of each part, in order, in shares as even as can be."""
    stops = [num_layers * part // parts for part in range(parts + 1)]
    return tuple(Range(start, stop) for start, stop in pairwise(stops))
