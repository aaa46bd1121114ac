"""Whether two services fit, and what they agree on.

Theory of operation: `compared_fields` turns an identity into named text values, `compare` names every
field that differs, and `negotiate` and `verify_welcome` raise one error that carries all differences. Decode
negotiates with the capabilities of prefill before it makes a slab, prefill on Hello, and decode verifies the
Welcome, so that neither has to trust the other's check.

A difference reads the same in every session and holds nothing of the host, neither nonce nor path: it goes
to clients, and a problem that was logged is known again by its differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import (
    Difference,
    GeometryMismatch,
    LayoutMismatch,
    ModelMismatch,
    NegotiationError,
    SlabNotShared,
    VersionMismatch,
)
from common.excerpt import around_difference
from common.kv.digest import DigestKind
from common.kv.geometry import KVGeometry, LayerGeometry
from common.kv.plan import SpanGranularity
from common.session.identity import EngineFacts, NumericsPolicy, PeerIdentity
from common.session.messages import Hello, TransferMode, VersionRange, Welcome

PROTOCOL_VERSIONS = VersionRange(3, 3)
"""What this code speaks."""

ABSENT = "absent"
"""Text of a field that one side does not have."""


@dataclass(frozen=True, slots=True)
class PrefillOffer:
    """What a prefill service brings to a session."""

    versions: VersionRange
    boot_id: str
    identity: PeerIdentity
    modes: tuple[TransferMode, ...]
    digests: tuple[DigestKind, ...]
    layouts: tuple[str, ...]
    granularity: SpanGranularity
    max_prompt_tokens: int
    max_concurrency: int
    engine: EngineFacts
    longest_step_ms: int = 0


@dataclass(frozen=True, slots=True)
class Agreement:
    """What both sides chose."""

    version: int
    modes: tuple[TransferMode, ...]
    digest: DigestKind


def compared_fields(identity: PeerIdentity) -> tuple[tuple[str, str], ...]:
    """Return every field that must be equal on both sides as (name, value)."""
    return _fields(identity, identity.geometry.layers)


def _fields(identity: PeerIdentity, layers: Sequence[LayerGeometry]) -> tuple[tuple[str, str], ...]:
    """Return the compared fields, of layers only those of `layers`."""
    fingerprint = identity.fingerprint
    return (
        ("fingerprint.config", fingerprint.config),
        ("fingerprint.weights", fingerprint.weights),
        ("fingerprint.rounded_weights", fingerprint.rounded_weights),
        ("fingerprint.tokenizer", fingerprint.tokenizer),
        *((f"config.{name}", value) for name, value in identity.config_fields),
        *((f"tokenizer.{name}", value) for name, value in identity.tokenizer_fields),
        *_geometry_fields(identity.geometry, layers),
        ("numerics.engine", identity.numerics.engine),
        ("numerics.chunk_tokens", str(identity.numerics.chunk_tokens)),
    )


def compare(
    decode: PeerIdentity, prefill: PeerIdentity, policy: NumericsPolicy = NumericsPolicy.EXACT
) -> tuple[Difference, ...]:
    """Return every field that keeps two services apart, in a stable order."""
    differing = differences_of(decode, prefill)
    if policy is NumericsPolicy.EXACT:
        return differing
    allowed = set(may_differ(decode, prefill))
    return tuple(one for one in differing if one not in allowed)


def may_differ(decode: PeerIdentity, prefill: PeerIdentity) -> tuple[Difference, ...]:
    """Return what differs and is only told where numerics are declared.

    That is how the KV is computed: engine and grid, the element type, of which the copy into the slot makes
    decode's, and weights that are the same checkpoint in another type. And how long each layer of prefill
    keeps what it computed: all of it, or at least what decode wants.
    """
    suffixes = (".dtype", *((".window", ".group") if _keeps_enough(decode, prefill) else ()))
    # Where the rounded ones differ too, it is another checkpoint, and both fields say so.
    is_one = decode.fingerprint.rounded_weights == prefill.fingerprint.rounded_weights
    names = ("numerics.engine", "numerics.chunk_tokens", *(("fingerprint.weights",) if is_one else ()))
    return tuple(
        one
        for one in differences_of(decode, prefill)
        if one.field in names or (one.field.startswith("geometry.layers[") and one.field.endswith(suffixes))
    )


def _keeps_enough(decode: PeerIdentity, prefill: PeerIdentity) -> bool:
    kept = {layer.layer_index: layer.window for layer in prefill.geometry.layers}
    pairs = [(layer.window, kept.get(layer.layer_index)) for layer in decode.geometry.layers]
    return all(has is None or (wanted is not None and has >= wanted) for wanted, has in pairs)


def differences_of(decode: PeerIdentity, prefill: PeerIdentity) -> tuple[Difference, ...]:
    """Return every field on which the two identities differ, in a stable order.

    Long values are shown where they begin to differ.

    Layers are compared when both have the same number; else the number is the difference, and they have no
    partners to be compared with.
    """
    layers = decode.geometry.layers, prefill.geometry.layers
    paired = layers if len(layers[0]) == len(layers[1]) else ((), ())
    ours, theirs = dict(_fields(decode, paired[0])), dict(_fields(prefill, paired[1]))
    names = [*ours, *(name for name in theirs if name not in ours)]
    return tuple(
        Difference(name, *around_difference(ours.get(name, ABSENT), theirs.get(name, ABSENT)))
        for name in names
        if ours.get(name) != theirs.get(name)
    )


def negotiate(hello: Hello, offer: PrefillOffer) -> Agreement:
    """Choose version, modes and digest; raise a `NegotiationError` with every difference otherwise.

    The slab of `hello` is judged by its layout alone, so that decode may ask before it has made one.
    """
    version = min(hello.versions.maximum, offer.versions.maximum)
    modes = tuple(mode for mode in hello.modes if mode in offer.modes)
    # Decode's order decides: it is the side that has to verify every byte.
    digest = next((kind for kind in hello.digests if kind in offer.digests), None)
    differences = [
        *compare(hello.identity, offer.identity, hello.numerics_policy),
        *_off_grid(offer.identity, offer.granularity),
    ]
    if version < max(hello.versions.minimum, offer.versions.minimum):
        differences.insert(0, Difference("protocol", str(hello.versions), str(offer.versions)))
    if not modes:
        differences.append(Difference("modes", _names(hello.modes), _names(offer.modes)))
    if hello.slab.layout not in offer.layouts:
        differences.append(Difference("layout", hello.slab.layout, ", ".join(offer.layouts)))
    if digest is None:
        differences.append(Difference("digests", _names(hello.digests), _names(offer.digests)))
    if differences or digest is None:
        raise refusal(differences)
    return Agreement(version, modes, digest)


def verify_welcome(hello: Hello, welcome: Welcome, nonce: bytes) -> None:
    """Check a Welcome against our Hello and the nonce in our slab; raise a `NegotiationError`."""
    differences = [
        *compare(hello.identity, welcome.identity, hello.numerics_policy),
        *_off_grid(welcome.identity, welcome.granularity),
    ]
    if not hello.versions.minimum <= welcome.version <= hello.versions.maximum:
        differences.insert(0, Difference("protocol", str(hello.versions), str(welcome.version)))
    # A subset, and not the same: an older prefill may speak fewer. One that was never offered is a breach.
    if not welcome.modes or not set(welcome.modes) <= set(hello.modes):
        differences.append(Difference("modes", _names(hello.modes), _names(welcome.modes)))
    if welcome.digest not in hello.digests:
        differences.append(Difference("digests", _names(hello.digests), welcome.digest.value))
    if welcome.nonce != nonce:
        differences.append(Difference("slab.nonce", "wrote one", "read another"))
    if differences:
        raise refusal(differences)


def refusal(differences: list[Difference]) -> NegotiationError:
    """Build the error class that names the gravest of the differences; it carries all of them."""
    # From what makes all else meaningless to what a restart with another flag mends: with another protocol
    # the fields may mean something else, without shared memory no geometry matters.
    fields = [difference.field for difference in differences]
    kinds: tuple[tuple[str, type[NegotiationError]], ...] = (
        ("protocol", VersionMismatch),
        ("slab", SlabNotShared),
        ("geometry.", GeometryMismatch),
        ("fingerprint.", ModelMismatch),
        ("config.", ModelMismatch),
        ("tokenizer.", ModelMismatch),
        ("numerics.", ModelMismatch),
        ("granularity.", ModelMismatch),
    )
    for prefix, kind in kinds:
        if any(field.startswith(prefix) for field in fields):
            return kind(differences)
    return LayoutMismatch(differences)


def _off_grid(prefill: PeerIdentity, granularity: SpanGranularity) -> tuple[Difference, ...]:
    """Return the difference of spans that are not cut by the grid on which prefill says that it computes."""
    computed, told = prefill.numerics.chunk_tokens, granularity.chunk_tokens
    return () if told == computed else (Difference("granularity.chunk_tokens", str(computed), str(told)),)


def _geometry_fields(geometry: KVGeometry, layers: Sequence[LayerGeometry]) -> list[tuple[str, str]]:
    groups = {index: group.group_index for group in geometry.groups for index in group.layer_indices}
    fields = [
        ("geometry.vocab_size", str(geometry.vocab_size)),
        ("geometry.num_layers", str(len(geometry.layers))),
    ]
    for layer in layers:
        name = f"geometry.layers[{layer.layer_index}]"
        fields += [
            (f"{name}.num_kv_heads", str(layer.num_kv_heads)),
            (f"{name}.head_dim", str(layer.head_dim)),
            (f"{name}.dtype", layer.dtype.value),
            (f"{name}.window", "none" if layer.window is None else str(layer.window)),
            (f"{name}.group", str(groups[layer.layer_index])),
        ]
    return fields


def _names(values: tuple[TransferMode, ...] | tuple[DigestKind, ...]) -> str:
    return ", ".join(value.value for value in values)
