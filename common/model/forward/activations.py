"""Give every activation of a model rows whose bits do not depend on how many rows run with them.

Theory of operation: torch computes an elementwise function in blocks of two vectors and what is left over at
the end one element at a time, and for some functions (SiLU, tanh GELU) the two ways round differently. Rows
are stored one after another, so which elements are left over depends on the number of rows, unless the width
of a row is a whole number of blocks. `stabilise_activations` pads narrower rows up to that and cuts the
result. Widths that are a multiple already, which most models have, run as they did. A large call is split
among threads at places that depend on their number, so with several threads rows are run in calls that stay
below that size.

    width 80        |row 0 ........ |row 1 ........ |    160 = 2 x 64 + 32: the end of row 1 is left over
    width 80 + 48   |row 0 ........ ---|row 1 ........ ---|    4 x 64: nothing is left over

Not here: products (`linears.py`), attention (`attention.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2CLS

BLOCK_ELEMENTS = 64
"""Two vectors of the widest registers in the narrowest dtype: 2 x 512 bits of bfloat16."""


SPLIT_ELEMENTS = 16384
"""Above this many elements torch splits GELU among its threads; other functions from twice as many on."""


class StableActivation(nn.Module):
    """An elementwise activation whose row results do not depend on the number of rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of rows [..., width]."""
        width = x.shape[-1]
        missing = -width % BLOCK_ELEMENTS
        padded = functional.pad(x, (0, missing)) if missing else x.contiguous()
        return self._in_calls(padded)[..., :width]

    def _in_calls(self, x: Tensor) -> Tensor:
        if torch.get_num_threads() == 1 or x.numel() < SPLIT_ELEMENTS:
            return self.inner(x)  # type: ignore[no-any-return]
        rows = x.reshape(-1, x.shape[-1])
        rows_per_call = max(1, (SPLIT_ELEMENTS - 1) // x.shape[-1])
        return torch.cat([self.inner(part) for part in rows.split(rows_per_call)]).view(x.shape)


def stabilise_activations(model: nn.Module) -> int:
    """Wrap every activation module of `model`, once; return how many are wrapped."""
    kinds = _elementwise_kinds()
    count = 0
    for parent in list(model.modules()):
        if isinstance(parent, StableActivation):
            count += 1
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, kinds):
                setattr(parent, name, StableActivation(child))
                count += 1
    return count


def _elementwise_kinds() -> tuple[type[nn.Module], ...]:
    """Return the classes behind transformers' names of activations."""
    entries = (entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values())
    return tuple({entry for entry in entries if isinstance(entry, type)})
