"""Rules of single fields that came from a peer."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from common.errors import RemoteProtocolError
from common.kv.ranges import Range
from common.wire import fields
from common.wire.fields import EnumTable
from kvspan.v1.geometry_pb2 import IndexRange


def test_range_is_refused_when_it_starts_after_its_end() -> None:
    """A range names both ends in the error, so that the sender can be found."""
    with pytest.raises(RemoteProtocolError, match=r"kv_span\.tokens is '\[5, 3\)'"):
        fields.index_range("kv_span.tokens", IndexRange(start=5, stop=3))


def test_range_is_refused_when_no_file_could_be_that_large() -> None:
    """Positions beyond what a file offset can hold never reach arithmetic."""
    with pytest.raises(RemoteProtocolError, match="kv_span"):
        fields.index_range("kv_span.tokens", IndexRange(start=5, stop=2**63))


def test_range_is_kept_when_it_is_the_largest() -> None:
    """The limit itself is allowed."""
    assert fields.index_range("x", IndexRange(start=3, stop=2**63 - 1)) == Range(3, 2**63 - 1)


@pytest.mark.parametrize("value", [-1, 0, 2**63])
def test_number_is_refused_when_outside_its_bounds(value: int) -> None:
    """A number below its minimum or above the largest index is named with its value."""
    with pytest.raises(RemoteProtocolError, match=f"attempt is {value}:"):
        fields.at_least("attempt", value, 1)


def test_text_is_refused_when_longer_than_any_honest_one() -> None:
    """The error tells both lengths and not the text."""
    with pytest.raises(RemoteProtocolError) as refused:
        fields.text("boot_id", "x" * 4_000_000)

    assert str(refused.value) == "boot_id is '4000000 characters': must have at most 1024"


def test_text_is_kept_when_it_has_the_largest_length() -> None:
    """The limit itself is allowed."""
    assert fields.text("boot_id", "x" * fields.MAX_TEXT_CHARS) == "x" * fields.MAX_TEXT_CHARS


def test_remark_is_cut_and_never_refused() -> None:
    """What is only said to people may be as long as the sender likes."""
    assert fields.remark("") == ""
    assert len(fields.remark("x" * 4_000_000)) == fields.MAX_TEXT_CHARS


def test_error_quotes_the_start_of_a_long_value_and_problem() -> None:
    """An error is logged, kept and sent, so a peer does not choose its length."""
    error = fields.malformed("name", "x" * 4_000_000, "y" * 4_000_000)

    assert len(str(error)) < 500
    assert str(error).startswith("name is 'xxx")


@pytest.mark.parametrize(
    "value",
    [
        Duration(seconds=-1),
        Duration(nanos=-5),
        Duration(nanos=10**9),
        Duration(seconds=fields.MAX_SECONDS + 1),
    ],
)
def test_duration_is_refused_when_negative_or_not_normal(value: Duration) -> None:
    """A time limit is a normal, non-negative duration."""
    with pytest.raises(RemoteProtocolError, match="time_limit"):
        fields.seconds("time_limit", value)


def test_duration_keeps_its_nanoseconds() -> None:
    """Seconds and nanoseconds are put together without a rounding of their own."""
    assert fields.seconds("x", fields.duration(2.000000003)) == 2.000000003


def test_enum_is_refused_when_unspecified() -> None:
    """The zero of every enum means that the sender forgot it."""
    table = EnumTable({"a": 1, "b": 4})

    with pytest.raises(RemoteProtocolError, match=r"mode is 0: must be one of \[1, 4\]"):
        table.native("mode", 0)


def test_offer_skips_values_that_only_a_newer_peer_knows() -> None:
    """A newer peer may offer more than is known here; the rest keeps its order."""
    table = EnumTable({"a": 1, "b": 4})

    assert table.offered("modes", [9, 4, 1]) == ("b", "a")


def test_offer_is_refused_when_it_holds_an_unspecified_value() -> None:
    """An offer with a hole is malformed, not shorter."""
    with pytest.raises(RemoteProtocolError, match=r"modes is \[4, 0\]"):
        EnumTable({"b": 4}).offered("modes", [4, 0])


def test_offer_is_refused_when_it_is_longer_than_any_choice() -> None:
    """An offer is counted before it is read."""
    numbers = [4] * (fields.MAX_CHOICES + 1)

    with pytest.raises(RemoteProtocolError, match=r"modes is '65 entries': must have at most 64"):
        EnumTable({"b": 4}).offered("modes", numbers)
    assert len(EnumTable({"b": 4}).offered("modes", numbers[1:])) == fields.MAX_CHOICES
