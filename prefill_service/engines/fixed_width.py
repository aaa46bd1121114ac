"""An engine with compiled widths: each pass is padded to one of them, and layers leave in groups.

Theory of operation: this is what accelerators with static shapes impose, over a torch model, so that a pair
meets it without one. A prompt runs at the smallest width that fits. A longer one runs in passes of the
largest width on its absolute grid, and the last at the smallest that fits; or it is refused when one pass is
all there is.

    widths 4, 8; 11 tokens   | 0 ........ 7 | 8 . 10 pad |        two passes, 8 and 4 wide
    layers, in groups of 2   | 0 1 | 2 3 | 4 |                    leave, and can be stopped, only there

Padding stands behind the prompt, and no position sees what follows it: so it changes no real row. Kernels may
round otherwise at another width, so the bits of a position depend on the width of its pass, which the
numerics say.

Ownership: as `ChunkedPrefill`, which computes; the KV of a group is kept until its last layer is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from common.engine.identity import EngineIdentity
from common.engine.prefill import EngineDescription, Logits, Wanted
from common.engine.setup import EngineSetup
from common.kv.ranges import Range
from common.kv.writer import KVWriter, Rows
from common.model.forward.prefill import ChunkedPrefill, numerics
from common.model.prepare import identity_of, load_stable

DEFAULT_WIDTHS = (128, 512, 2048)
DEFAULT_LAYER_GROUP = 8

MARGIN = 4
"""Times the group that was measured at start: a busy host takes longer, and too short a limit loses peers."""


@dataclass(frozen=True, slots=True)
class FixedWidths:
    """What the hardware imposes."""

    widths: tuple[int, ...]
    layer_group: int
    """Layers that leave the engine together."""

    is_single_pass: bool
    """Whether a prompt above the largest width is refused."""


def make_engine(setup: EngineSetup) -> FixedWidthEngine:
    """Return the engine `fixed-width`; options: widths, layer_group, passes."""
    options = setup.options
    widths = options.integers("widths", DEFAULT_WIDTHS)
    shape = FixedWidths(
        widths=widths,
        layer_group=options.integer("layer_group", DEFAULT_LAYER_GROUP, minimum=1),
        is_single_pass=options.choice("passes", ("many", "one"), "many") == "one",
    )
    if not widths:
        raise options.refuse("widths", "must name at least one width")
    options.close()
    stable = load_stable(setup)
    limit = min(stable.max_prompt_tokens, widths[-1]) if shape.is_single_pass else stable.max_prompt_tokens
    prefill = ChunkedPrefill(stable.loaded.model, stable.loaded.geometry, widths[-1], limit, widths)
    rules = numerics(stable.loaded.model, widths[-1], stable.report)
    told = (*rules, f"widths {' '.join(map(str, widths))}")
    return FixedWidthEngine(prefill, identity_of(stable.loaded), told, shape, stable.report.rows_rule)


class FixedWidthEngine:
    """A `PrefillEngine` whose passes have one of few widths."""

    def __init__(
        self,
        prefill: ChunkedPrefill,
        identity: EngineIdentity,
        numerics: tuple[str, ...],
        shape: FixedWidths,
        kernels: str = "",
    ) -> None:
        """Measure how long a group of layers takes at the largest width."""
        self._prefill = prefill
        self._identity = identity
        layers = [layer.layer_index for layer in identity.geometry.layers]
        self._groups = [
            tuple(layers[start : start + shape.layer_group])
            for start in range(0, len(layers), shape.layer_group)
        ]
        self._description = EngineDescription(
            name="fixed-width",
            numerics=numerics,
            max_prompt_tokens=prefill.max_prompt_tokens,
            chunk_tokens=None if shape.is_single_pass else shape.widths[-1],
            widths=shape.widths,
            layer_stops=tuple(group[0] for group in self._groups[1:]),
            longest_step_ms=MARGIN * self._measure_ms(),
            kernels=kernels,
        )

    def identity(self) -> EngineIdentity:
        """See `PrefillEngine`."""
        return self._identity

    def describe(self) -> EngineDescription:
        """See `PrefillEngine`."""
        return self._description

    def prefill(
        self,
        token_ids: list[int],
        wanted: Wanted,
        writer: KVWriter,
        is_cancelled: Callable[[], bool],
    ) -> Logits:
        """See `PrefillEngine`."""
        together = _Together(self._groups, writer, is_cancelled)
        logits = self._prefill.prefill(token_ids, wanted, together, together.is_cancelled)
        together.flush()
        return logits

    def _measure_ms(self) -> int:
        """Return how long a group takes in a pass of the largest width, at least 1 ms."""
        width = min(self._prefill.chunk_tokens, self._prefill.max_prompt_tokens)
        started_ns = time.monotonic_ns()
        self._prefill.prefill([0] * width, {}, _Nowhere(), lambda: False)
        return 1 + (time.monotonic_ns() - started_ns) // (len(self._groups) * 1_000_000)


class _Nowhere:
    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """Nothing is wanted of a pass that is only timed."""


class _Together:
    """Hands the layers of a group over when the last of them is done, and asks for a stop only before it.

    Ownership: of one prompt. Rows are views of what the model computed, which nobody writes again.
    """

    def __init__(
        self, groups: list[tuple[int, ...]], writer: KVWriter, is_cancelled: Callable[[], bool]
    ) -> None:
        self._last = {layer: group[-1] for group in groups for layer in group}
        self._starts = {group[0] for group in groups}
        self._order = [layer for group in groups for layer in group]
        self._num_asked = 0
        # Invariant: layers that were begun, over all passes: the next one is its remainder by the layers.
        self._writer = writer
        self._is_cancelled = is_cancelled
        self._held: list[tuple[int, Range, Rows, Rows]] = []

    def is_cancelled(self) -> bool:
        """Tell whether to stop; called once at the start of every layer."""
        layer = self._order[self._num_asked % len(self._order)]
        self._num_asked += 1
        if layer not in self._starts:
            return False
        # The group before is done: what of it nobody wanted was never written.
        self.flush()
        return self._is_cancelled()

    def write(self, layer_index: int, tokens: Range, keys: Rows, values: Rows) -> None:
        """See `KVWriter`."""
        self._held.append((layer_index, tokens, keys, values))
        if layer_index == self._last[layer_index]:
            self.flush()

    def flush(self) -> None:
        """Hand over what is held: its group is done, whether or not its last layer was wanted."""
        held, self._held = self._held, []
        for one in held:
            self._writer.write(*one)
