"""`kvspan check` shows every compared field, judges as a session would, and asks how the session stands."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.kv.digest import DigestKind
from common.kv.plan import SpanGranularity
from common.session.identity import NumericsPolicy
from common.session.messages import VersionRange
from common.session.negotiation import PROTOCOL_VERSIONS, compared_fields
from common.wire.convert_identity import IDENTITY, VERSIONS
from common.wire.enums import DIGESTS, MODES
from kvspan.commands import check
from kvspan.commands.check import (
    Row,
    compare_rows,
    hello_of,
    problem_lines,
    session_rows,
    settled_status,
    table_lines,
)
from kvspan.v1 import decode_pb2
from tests.support.factories import make_geometry
from tests.support.sessions import make_hello, make_identity, make_offer


def test_services_that_fit_have_no_row_that_differs() -> None:
    """Every field that a session compares has a row, and all are ok."""
    rows = compare_rows(make_hello(), make_offer())

    assert {name for name, _ in compared_fields(make_identity())} < {row.field for row in rows}
    assert all(row.is_ok for row in rows)


def test_what_may_differ_is_marked_where_numerics_are_declared() -> None:
    """It is no reason to fail, and an operator sees both values all the same."""
    identity = make_identity()
    theirs = dataclasses.replace(identity, numerics=dataclasses.replace(identity.numerics, engine="npu"))
    hello = dataclasses.replace(make_hello(), numerics_policy=NumericsPolicy.DECLARED)

    rows = {row.field: row for row in compare_rows(hello, make_offer(theirs))}

    assert all(row.is_ok for row in rows.values())
    assert [row.field for row in rows.values() if row.is_noted] == ["numerics.engine"]
    (line,) = table_lines([rows["numerics.engine"]])[1:]
    assert line.split() == ["numerics.engine", "torch-cpu", "npu", "declared"]


def test_each_difference_is_a_row_with_both_values() -> None:
    """Fields of the model, of the numerics and of the protocol are all judged."""
    identity = make_identity()
    numerics = dataclasses.replace(identity.numerics, chunk_tokens=7)
    offer = dataclasses.replace(
        make_offer(dataclasses.replace(identity, numerics=numerics)),
        granularity=dataclasses.replace(make_offer().granularity, chunk_tokens=7),
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


def test_a_grid_that_differs_is_a_row_of_its_own() -> None:
    """Whatever a session would be refused for is shown, though it is no field of the model."""
    offer = dataclasses.replace(make_offer(), granularity=SpanGranularity(7, 0, 4096))

    different = [row for row in compare_rows(make_hello(), offer) if not row.is_ok]

    assert different == [Row("granularity.chunk_tokens", "2", "7", is_ok=False)]


def make_status(**peer: Any) -> decode_pb2.GetStatusResponse:
    """Return the status of a decode service with one peer, whose life is `prefill-boot`."""
    given = {"target": "unix:/p", "boot_id": "prefill-boot", "state": decode_pb2.SESSION_STATE_OPEN, **peer}
    return decode_pb2.GetStatusResponse(peers=[decode_pb2.PeerStatus(**given)])


REFUSED = decode_pb2.SESSION_STATE_REFUSED
NOT_SHARED = decode_pb2.FieldDifference(field="slab.socket", decode_value="made it", prefill_value="no file")


def test_an_open_session_shows_that_the_slab_is_shared() -> None:
    """Prefill has read the nonce that decode wrote."""
    status = make_status()

    assert session_rows(status, "prefill-boot", set()) == (Row("slab", "made it", "mapped it", is_ok=True),)
    assert problem_lines(status, "prefill-boot") == []


def test_a_slab_that_is_not_shared_is_a_row_that_differs() -> None:
    """Capabilities that fit are not enough."""
    status = make_status(
        state=REFUSED, reason="SLAB_NOT_SHARED", problem="peers do not fit", differences=[NOT_SHARED]
    )

    assert session_rows(status, "prefill-boot", {"protocol"}) == (
        Row("slab.socket", "made it", "no file", is_ok=False),
    )
    assert problem_lines(status, "prefill-boot") == ["no session: SLAB_NOT_SHARED: peers do not fit"]


def test_what_the_capabilities_show_is_not_told_twice() -> None:
    """A session that was refused for the version has a row for that already."""
    difference = decode_pb2.FieldDifference(field="protocol", decode_value="1..1", prefill_value="8..9")
    status = make_status(state=REFUSED, reason="PROTOCOL_VERSION_MISMATCH", differences=[difference])

    assert session_rows(status, "prefill-boot", {"protocol"}) == ()


def test_a_session_that_fails_otherwise_does_not_pass() -> None:
    """The slab directory of decode may be full, for one."""
    status = make_status(state=decode_pb2.SESSION_STATE_GREETING, reason="CONFIG_INVALID", problem="full")

    assert session_rows(status, "prefill-boot", set()) == (
        Row("session", "none", "CONFIG_INVALID", is_ok=False),
    )


def test_services_without_a_session_do_not_pass() -> None:
    """Nothing has shown that they share memory: decode was told another address, or none."""
    status = make_status(boot_id="another-boot")

    (row,) = session_rows(status, "prefill-boot", set())
    (line,) = problem_lines(status, "prefill-boot")

    assert not row.is_ok
    assert "only with: unix:/p (open)" in line


def test_a_session_that_is_being_opened_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check right after the start says what will be so."""
    monkeypatch.setattr(check, "SETTLE_PAUSE_S", 0.0)
    steps = [
        make_status(boot_id="", state=decode_pb2.SESSION_STATE_CONNECTING),
        make_status(state=decode_pb2.SESSION_STATE_GREETING),
        make_status(),
    ]

    assert settled_status(iter(steps).__next__, "prefill-boot") == steps[2]


def test_table_cuts_long_values_only_where_both_agree() -> None:
    """A value that differs is printed where it does."""
    identity = make_identity()
    long = dataclasses.replace(identity, config_fields=(("rope", "7" * 900),))
    longer = dataclasses.replace(identity, config_fields=(("rope", "7" * 901),))

    agreed = "\n".join(table_lines(compare_rows(make_hello(long), make_offer(long))))
    differing = "\n".join(table_lines(compare_rows(make_hello(long), make_offer(longer))))

    assert "7" * 60 not in agreed
    assert f"…{'7' * 60}  …{'7' * 61}  DIFFERS" in differing
    assert "DIFFERS" in differing
    assert "DIFFERS" not in agreed


def test_capabilities_of_decode_say_what_it_would_open_a_session_with() -> None:
    """Nothing but the slab is lost between a Hello and the capabilities."""
    hello = make_hello()
    capabilities = decode_pb2.DecodeServiceGetCapabilitiesResponse(
        versions=VERSIONS.write(hello.versions),
        boot_id=hello.boot_id,
        identity=IDENTITY.write(hello.identity),
        modes=[MODES.number(mode) for mode in hello.modes],
        digests=[DIGESTS.number(kind) for kind in hello.digests],
    )

    assert dataclasses.replace(hello_of(capabilities), slab=hello.slab) == hello
