"""What the services need from whatever computes a prompt.

Theory of operation: an engine is called from one thread, one prompt at a time, and need not be re-entrant. It
says once what its hardware imposes (`EngineDescription`); per prompt it is told what is wanted, hands
finished KV to a writer in the order that it declared, and returns the logits of the last position:

    by chunk    chunk 0: layers in order of the model, chunk 1: layers, …
    by layer    each layer of the whole prompt, in order of the model: one chunk that has no limit

Not here: what takes the rows (`common/kv/writer.py`), what computes a decode step (`decode.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.engine.identity import EngineIdentity
from common.kv.geometry import KVGeometry
from common.kv.ranges import Range
from common.kv.writer import KVWriter
from common.session.identity import Numerics, PeerIdentity

Logits = NDArray[np.float32]
"""Of one position [vocab], or of several lanes [lanes, vocab]; on the CPU."""

Wanted = Mapping[int, Range]
"""Per KV-owning model layer the positions that are taken, a suffix of the prompt; one may be empty."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an engine computes with, fixed for its life."""

    name: str

    numerics: tuple[str, ...]
    """What decides the bits of its KV, compared between the two services."""

    max_prompt_tokens: int
    """Longest prompt; longer ones are refused before they reach the engine."""

    chunk_tokens: int | None = None
    """Grid of absolute positions on which it computes and delivers; None when it delivers by layer."""

    widths: tuple[int, ...] = ()
    """Compiled widths in tokens, ascending: a pass is padded to one of them; none when any width will do."""

    layer_stops: tuple[int, ...] = ()
    """Model layers before which layers end that leave the engine together; no span crosses one."""

    longest_step_ms: int = 0
    """Longest time it cannot be stopped within; 0 when it asks `is_cancelled` at every layer."""

    can_resume: bool = False
    """Whether it can start from KV that it is given, and compute only what follows."""

    kernels: str = ""
    """Which kernels it uses and what they promise, for people."""

    @property
    def numerics_text(self) -> str:
        """Return what decides the bits as one text."""
        return ", ".join(self.numerics)


class PrefillEngine(Protocol):
    """Computes prompts."""

    def identity(self) -> EngineIdentity:
        """Return the checkpoint it computes with, and the KV it can deliver."""

    def describe(self) -> EngineDescription:
        """Return what it imposes."""

    def prefill(
        self,
        token_ids: list[int],
        wanted: Wanted,
        writer: KVWriter,
        is_cancelled: Callable[[], bool],
    ) -> Logits:
        """Compute a prompt, write the KV that is wanted and return the logits of its last position [vocab].

        Calls `writer` for the wanted positions of each layer in the declared order, as soon as that KV is
        final: once per chunk and layer that has some; positions that nobody wants may be left out or handed
        over with them. Asks `is_cancelled` at least once per layer, or every `longest_step_ms`.

        Raises: `Cancelled` when told so, `EngineError` when it cannot, and whatever the writer raises; the
        engine then serves the next prompt as if nothing had been. Once it has returned or raised it writes no
        more, and keeps neither the writer nor what it handed over.
        """


def wanted_of(geometry: KVGeometry, required: tuple[Range, ...]) -> dict[int, Range]:
    """Return what is wanted of each layer, given what is required of its group."""
    return {layer: required[group.group_index] for layer, (group, _) in geometry.by_layer.items()}


def peer_identity(identity: EngineIdentity, description: EngineDescription) -> PeerIdentity:
    """Return who a service is that computes prompts of this checkpoint so."""
    return PeerIdentity(
        model_name=identity.model_name,
        fingerprint=identity.fingerprint,
        config_fields=identity.config_fields,
        geometry=identity.geometry,
        numerics=Numerics(description.numerics_text, description.chunk_tokens or 0),
        tokenizer_fields=identity.tokenizer_fields,
    )
