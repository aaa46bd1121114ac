"""Whether two services fit, and that a refusal names every difference."""

import dataclasses
from dataclasses import replace

import pytest

from common.errors import (
    Difference,
    GeometryMismatch,
    LayoutMismatch,
    ModelMismatch,
    NegotiationError,
    SlabNotShared,
    VersionMismatch,
)
from common.excerpt import SHOWN_CHARS
from common.kv.digest import DigestKind
from common.kv.geometry import DType, KVGeometry, LayerGeometry
from common.kv.plan import SpanGranularity
from common.kv.spans import PART_ALIGNMENT
from common.session.identity import EngineFacts
from common.session.messages import SlabHandle, TransferMode, VersionRange
from common.session.negotiation import (
    PROTOCOL_VERSIONS,
    Agreement,
    PrefillOffer,
    compare,
    compared_fields,
    negotiate,
    refusal,
    verify_welcome,
)
from tests.support.factories import make_geometry, make_hybrid_geometry
from tests.support.identities import (
    IDENTITY_CHANGES,
    fields_of,
    per_layer,
    with_fingerprint,
    with_numerics,
    with_rope,
    with_template,
)
from tests.support.sessions import GRANULARITY, NONCE, make_hello, make_identity, make_offer, make_welcome


def test_equal_peers_agree_on_version_modes_and_the_digest_that_decode_prefers() -> None:
    """Decode lists digests best first, so its order decides."""
    agreement = negotiate(make_hello(), make_offer())

    assert agreement == Agreement(PROTOCOL_VERSIONS.maximum, tuple(TransferMode), DigestKind.XXH3_64)


def test_the_newest_common_version_is_chosen() -> None:
    """Ranges 2..5 and 1..4 meet in 4."""
    hello = replace(make_hello(), versions=VersionRange(2, 5))

    assert negotiate(hello, replace(make_offer(), versions=VersionRange(1, 4))).version == 4


def test_only_modes_of_both_are_agreed() -> None:
    """The agreement is the intersection in the order of decode."""
    hello = replace(make_hello(), modes=(TransferMode.WHOLE, TransferMode.STREAM))
    offer = replace(make_offer(), modes=(TransferMode.STREAM, TransferMode.DEFERRED))

    assert negotiate(hello, offer).modes == (TransferMode.STREAM,)


def test_the_first_digest_that_prefill_has_is_chosen() -> None:
    """A preference that prefill lacks is passed over."""
    offer = replace(make_offer(), digests=(DigestKind.OFF,))

    assert negotiate(make_hello(), offer).digest is DigestKind.OFF


def test_capacities_may_differ() -> None:
    """N2: slab, prompt and concurrency limits are each side's own and never compared."""
    hello = replace(make_hello(), slab=replace(make_hello().slab, size_bytes=1 << 40))
    offer = replace(make_offer(), max_prompt_tokens=1_000_003, max_concurrency=1, engine=EngineFacts("other"))

    assert negotiate(hello, offer) == negotiate(make_hello(), make_offer())


def test_the_name_of_the_model_and_the_boot_are_never_compared() -> None:
    """Names are for people; content digests decide."""
    renamed = replace(make_identity(), model_name="/another/path")

    negotiate(make_hello(), replace(make_offer(renamed), boot_id="decode-boot"))
    assert compare(make_identity(), renamed) == ()


def test_a_welcome_that_fits_is_taken() -> None:
    """What negotiate agreed on passes the check of the other side."""
    verify_welcome(make_hello(), make_welcome(), NONCE)


@pytest.mark.parametrize("name", IDENTITY_CHANGES)
def test_prefill_refuses_a_hello_and_names_the_field_when_one_differs(name: str) -> None:
    """N1: the refusal names exactly the fields that differ, and its class says of which kind they are."""
    change, fields, kind = IDENTITY_CHANGES[name]

    with pytest.raises(NegotiationError) as refused:
        negotiate(make_hello(), make_offer(change(make_identity())))

    assert fields_of(refused.value) == fields
    assert type(refused.value) is kind


@pytest.mark.parametrize("name", IDENTITY_CHANGES)
def test_decode_refuses_a_welcome_and_names_the_field_when_one_differs(name: str) -> None:
    """Decode does not trust the check of prefill."""
    change, fields, kind = IDENTITY_CHANGES[name]

    with pytest.raises(NegotiationError) as refused:
        verify_welcome(make_hello(), make_welcome(change(make_identity())), NONCE)

    assert fields_of(refused.value) == fields
    assert type(refused.value) is kind


def test_both_values_are_told_when_a_field_differs() -> None:
    """The reader learns which side has which value."""
    differences = compare(make_identity(), with_rope("500000.0")(make_identity()))

    assert differences == (Difference("config.rope_theta", "10000.0", "500000.0"),)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("{{ role }}", "{{  role }}"), (r"{{ role }}\n", r"{{ role }}\r\n")],
    ids=["a space", "line endings"],
)
def test_long_values_are_told_where_they_differ(ours: str, theirs: str) -> None:
    """Row Y10: of two templates the reader sees the place, and not two starts that are alike."""
    before, after = '"' + "a" * 20_000, "b" * 20_000 + '"'
    first, second = (with_template(before + value + after)(make_identity()) for value in (ours, theirs))

    (difference,) = compare(first, second)

    assert difference.field == "tokenizer.chat_template"
    assert "aaa" + ours + "bbb" in difference.decode_value
    assert "aaa" + theirs + "bbb" in difference.prefill_value
    assert len(difference.decode_value) == len(difference.prefill_value) == SHOWN_CHARS


def test_equal_sizes_do_not_hide_another_type() -> None:
    """N10: float16 and bfloat16 have the same bytes per element and are refused by name."""
    half, brain = (make_identity(make_geometry(dtype=kind)) for kind in (DType.FLOAT16, DType.BFLOAT16))

    with pytest.raises(GeometryMismatch) as refused:
        negotiate(make_hello(half), make_offer(brain))

    assert refused.value.differences[0] == Difference("geometry.layers[0].dtype", "float16", "bfloat16")


@pytest.mark.parametrize("num_layers", [1, 3, 4000])
def test_another_number_of_layers_is_one_difference(num_layers: int) -> None:
    """Layers without partners are not listed one by one, also not where they would differ."""
    other = make_identity(make_geometry(num_layers=num_layers, num_kv_heads=5))

    assert compare(make_identity(), other) == (Difference("geometry.num_layers", "2", str(num_layers)),)
    assert compare(other, make_identity()) == (Difference("geometry.num_layers", str(num_layers), "2"),)


def test_a_layer_of_another_index_is_refused() -> None:
    """Layers that own KV are compared by their place in the model, not by their count."""
    shifted = KVGeometry(tuple(LayerGeometry(index, 3, 8, DType.FLOAT32, None) for index in (0, 2)), 11)

    differences = {each.field: each for each in compare(make_identity(), make_identity(shifted))}

    assert differences["geometry.layers[1].dtype"].prefill_value == "absent"
    assert differences["geometry.layers[2].dtype"].decode_value == "absent"


def test_a_group_map_that_differs_is_refused() -> None:
    """S4: the same layers in another order of groups are other groups."""
    ours = make_identity(make_hybrid_geometry(windows=(6, None)))
    theirs = make_identity(make_hybrid_geometry(windows=(None, 6)))

    with pytest.raises(GeometryMismatch) as refused:
        negotiate(make_hello(ours), make_offer(theirs))

    assert per_layer("window") <= fields_of(refused.value)


def test_a_moved_group_index_is_named_even_where_the_layer_itself_is_equal() -> None:
    """A layer in group 1 here and group 0 there would be filed under another group by its spans."""
    ours = make_identity(make_hybrid_geometry(windows=(6, None)))
    theirs = make_identity(make_hybrid_geometry(windows=(None, None), head_dim=8))

    fields = {difference.field for difference in compare(ours, theirs)}

    assert "geometry.layers[1].group" in fields
    assert "geometry.layers[1].window" not in fields


def test_a_config_key_that_one_side_lacks_is_named() -> None:
    """An absent key is a difference, not a pass."""
    longer = replace(
        make_identity(), config_fields=(("hidden_size", "48"), ("rope_theta", "10000.0"), ("scale", "2"))
    )

    assert compare(make_identity(), longer) == (Difference("config.scale", "absent", "2"),)
    assert compare(longer, make_identity()) == (Difference("config.scale", "2", "absent"),)


def test_every_compared_field_has_its_own_name() -> None:
    """Two fields of one name would hide one of them."""
    names = [name for name, _ in compared_fields(make_identity(make_hybrid_geometry()))]

    assert len(names) == len(set(names))


@pytest.mark.parametrize("theirs", [VersionRange(3, 4), VersionRange(0, 0)])
def test_protocol_ranges_that_do_not_meet_are_refused(theirs: VersionRange) -> None:
    """Newer and older alike; both ranges are told."""
    hello = replace(make_hello(), versions=VersionRange(1, 2))

    with pytest.raises(VersionMismatch) as refused:
        negotiate(hello, replace(make_offer(), versions=theirs))

    assert refused.value.differences == (Difference("protocol", "1..2", str(theirs)),)


@pytest.mark.parametrize(
    ("offer", "field"),
    [
        (replace(make_offer(), modes=()), "modes"),
        (replace(make_offer(), digests=(DigestKind.XXH3_128,)), "digests"),
        (replace(make_offer(), layouts=("layer-token-kv/le/64",)), "layout"),
    ],
)
def test_no_common_mode_digest_or_layout_is_refused(offer: PrefillOffer, field: str) -> None:
    """What is chosen needs at least one common value."""
    with pytest.raises(LayoutMismatch) as refused:
        negotiate(make_hello(), offer)

    assert fields_of(refused.value) == {field}


def test_every_difference_is_named_when_several_fields_differ() -> None:
    """One attempt tells the operator everything; the gravest kind gives the class."""
    theirs = make_identity(make_geometry(vocab_size=12))
    theirs = with_fingerprint(weights="3f")(with_rope("1.0")(with_numerics(engine="npu")(theirs)))
    offer = replace(make_offer(theirs), versions=VersionRange(7, 8), modes=(), digests=(), layouts=())

    with pytest.raises(VersionMismatch) as refused:
        negotiate(make_hello(), offer)

    assert [difference.field for difference in refused.value.differences] == [
        "protocol",
        "fingerprint.weights",
        "config.rope_theta",
        "geometry.vocab_size",
        "numerics.engine",
        "modes",
        "layout",
        "digests",
    ]
    assert all(difference.field in str(refused.value) for difference in refused.value.differences)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        (["digests", "numerics.engine", "geometry.vocab_size", "slab.nonce", "protocol"], VersionMismatch),
        (["digests", "numerics.engine", "geometry.vocab_size", "slab.nonce"], SlabNotShared),
        (["digests", "numerics.engine", "geometry.vocab_size"], GeometryMismatch),
        (["digests", "numerics.engine"], ModelMismatch),
        (["digests"], LayoutMismatch),
    ],
)
def test_the_class_of_a_refusal_is_the_gravest_kind(fields: list[str], kind: type[NegotiationError]) -> None:
    """Version, then memory, then shape, then model, then layout."""
    error = refusal([Difference(field, "a", "b") for field in fields])

    assert type(error) is kind
    assert len(error.differences) == len(fields)


def test_a_wrong_nonce_means_that_the_slab_is_not_shared() -> None:
    """A prefill that mapped another memory cannot know what decode wrote."""
    welcome = replace(make_welcome(), nonce=bytes(32))

    with pytest.raises(SlabNotShared) as refused:
        verify_welcome(make_hello(), welcome, NONCE)

    assert refused.value.differences == (Difference("slab.nonce", "wrote one", "read another"),)


@pytest.mark.parametrize("version", [2, 4])
def test_a_version_outside_our_range_is_refused(version: int) -> None:
    """Prefill may only choose what decode offered."""
    with pytest.raises(VersionMismatch):
        verify_welcome(make_hello(), replace(make_welcome(), version=version), NONCE)


@pytest.mark.parametrize("modes", [(), (TransferMode.STREAM, TransferMode.WHOLE)])
def test_modes_that_were_not_offered_are_refused(modes: tuple[TransferMode, ...]) -> None:
    """Neither none at all nor one more than decode accepts."""
    hello = replace(make_hello(), modes=(TransferMode.STREAM,))

    with pytest.raises(LayoutMismatch) as refused:
        verify_welcome(hello, replace(make_welcome(), modes=modes), NONCE)

    assert fields_of(refused.value) == {"modes"}


def test_a_digest_that_was_not_offered_is_refused() -> None:
    """A weaker or unknown digest is not accepted silently."""
    with pytest.raises(LayoutMismatch) as refused:
        verify_welcome(make_hello(), replace(make_welcome(), digest=DigestKind.XXH3_128), NONCE)

    assert fields_of(refused.value) == {"digests"}


@pytest.mark.parametrize("chunk_tokens", [1, 3, 2**32 - 1])
def test_a_granularity_off_the_agreed_grid_is_refused(chunk_tokens: int) -> None:
    """Decode plans by it, so that another chunk could make as many spans of a prompt as a peer likes."""
    granularity = replace(GRANULARITY, chunk_tokens=chunk_tokens)

    with pytest.raises(ModelMismatch) as refused:
        verify_welcome(make_hello(), replace(make_welcome(), granularity=granularity), NONCE)

    assert refused.value.differences == (Difference("granularity.chunk_tokens", "2", str(chunk_tokens)),)


def test_a_granularity_off_the_grid_is_refused_before_there_is_a_slab() -> None:
    """The capabilities show it, so that no session has to be opened for it."""
    offer = replace(make_offer(), granularity=replace(GRANULARITY, chunk_tokens=7))

    with pytest.raises(ModelMismatch) as refused:
        negotiate(make_hello(), offer)

    assert refused.value.differences == (Difference("granularity.chunk_tokens", "2", "7"),)


@pytest.mark.parametrize("span_bytes", [PART_ALIGNMENT, 1 << 40])
def test_a_granularity_of_any_span_size_is_taken(span_bytes: int) -> None:
    """The sizes of spans are the choice of whoever runs the prefill service."""
    granularity = SpanGranularity(GRANULARITY.chunk_tokens, PART_ALIGNMENT, span_bytes)

    verify_welcome(make_hello(), replace(make_welcome(), granularity=granularity), NONCE)


def test_all_differences_of_a_welcome_are_named() -> None:
    """The nonce does not hide the model, nor the model the nonce."""
    welcome = replace(make_welcome(with_rope("1.0")(make_identity())), nonce=bytes(32), version=7)

    with pytest.raises(VersionMismatch) as refused:
        verify_welcome(make_hello(), welcome, NONCE)

    assert fields_of(refused.value) == {"protocol", "config.rope_theta", "slab.nonce"}


def test_a_slab_is_told_by_name_and_size_and_never_by_address() -> None:
    """N8: the nonce is proof of shared memory; no message carries an address or a locality claim."""
    assert {field.name for field in dataclasses.fields(SlabHandle)} == {"name", "size_bytes", "layout"}
