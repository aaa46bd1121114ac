"""`kvspan check` shows every compared field and judges as a session would."""

from __future__ import annotations

import dataclasses

from common.kv.digest import DigestKind
from common.session.messages import VersionRange
from common.session.negotiation import PROTOCOL_VERSIONS, compared_fields
from common.wire.convert_identity import identity_to_proto, versions_to_proto
from common.wire.enums import DIGESTS, MODES
from kvspan.commands.check import compare_rows, hello_of, table_lines
from kvspan.v1 import decode_pb2
from tests.support.factories import make_geometry
from tests.support.sessions import make_hello, make_identity, make_offer


def test_services_that_fit_have_no_row_that_differs() -> None:
    """Every field that a session compares has a row, and all are ok."""
    rows = compare_rows(make_hello(), make_offer())

    assert {name for name, _ in compared_fields(make_identity())} < {row.field for row in rows}
    assert all(row.is_ok for row in rows)


def test_each_difference_is_a_row_with_both_values() -> None:
    """Fields of the model, of the numerics and of the protocol are all judged."""
    identity = make_identity()
    numerics = dataclasses.replace(identity.numerics, chunk_tokens=7)
    offer = dataclasses.replace(
        make_offer(dataclasses.replace(identity, numerics=numerics)),
        versions=VersionRange(8, 9),
        digests=(DigestKind.OFF,),
    )
    hello = dataclasses.replace(make_hello(), digests=(DigestKind.XXH3_128,))

    different = {
        row.field: (row.decode_value, row.prefill_value)
        for row in compare_rows(hello, offer)
        if not row.is_ok
    }

    assert different == {
        "protocol": (str(PROTOCOL_VERSIONS), "8..9"),
        "digests": ("xxh3-128", "off"),
        "numerics.chunk_tokens": (str(identity.numerics.chunk_tokens), "7"),
    }


def test_field_of_one_side_only_is_shown_as_absent() -> None:
    """A configuration key that only one side has differs too."""
    identity = make_identity()
    offer = make_offer(dataclasses.replace(identity, config_fields=(*identity.config_fields, ("zeta", "1"))))

    row = next(row for row in compare_rows(make_hello(), offer) if row.field == "config.zeta")

    assert (row.decode_value, row.prefill_value, row.is_ok) == ("absent", "1", False)


def test_layer_of_one_side_only_is_no_match() -> None:
    """A refusal tells the number of layers; the table still shows which one has no partner."""
    offer = make_offer(make_identity(make_geometry(num_layers=3)))

    different = {row.field for row in compare_rows(make_hello(), offer) if not row.is_ok}

    assert {"geometry.num_layers", "geometry.layers[2].head_dim"} <= different
    assert "geometry.layers[1].head_dim" not in different


def test_table_cuts_long_values_only_where_both_agree() -> None:
    """A value that differs is printed whole."""
    identity = make_identity()
    long = dataclasses.replace(identity, config_fields=(("rope", "7" * 90),))
    longer = dataclasses.replace(identity, config_fields=(("rope", "7" * 91),))

    agreed = "\n".join(table_lines(compare_rows(make_hello(long), make_offer(long))))
    differing = "\n".join(table_lines(compare_rows(make_hello(long), make_offer(longer))))

    assert "7" * 90 not in agreed
    assert "7" * 91 in differing
    assert "DIFFERS" in differing
    assert "DIFFERS" not in agreed


def test_capabilities_of_decode_say_what_it_would_open_a_session_with() -> None:
    """Nothing but the slab is lost between a Hello and the capabilities."""
    hello = make_hello()
    capabilities = decode_pb2.DecodeServiceGetCapabilitiesResponse(
        versions=versions_to_proto(hello.versions),
        boot_id=hello.boot_id,
        identity=identity_to_proto(hello.identity),
        modes=[MODES.number(mode) for mode in hello.modes],
        digests=[DIGESTS.number(kind) for kind in hello.digests],
    )

    assert dataclasses.replace(hello_of(capabilities), slab=hello.slab) == hello
