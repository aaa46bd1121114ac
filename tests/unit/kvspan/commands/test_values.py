"""Texts of flags become values, or say which rule they break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvspan.commands import values


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("3KiB", 3 << 10), ("5mib", 5 << 20), ("2 GiB", 2 << 30), ("7B", 7)],
)
def test_size_takes_binary_units(text: str, num_bytes: int) -> None:
    """A size is bytes, alone or with a binary unit."""
    assert values.size(1)(text) == num_bytes


@pytest.mark.parametrize(
    ("parse", "text", "rule"),
    [
        (values.size(1), "5MB", "must be a size such as"),
        (values.size(1), "-1", "must be a size such as"),
        (values.size(1), "", "must be a size such as"),
        (values.size(2 << 20), "1MiB", "must be at least 2MiB"),
        (values.size(1, 4096), "5000", "must be a multiple of 4KiB"),
        (values.integer(1), "0", "must be at least 1"),
        (values.integer(1, 3), "4", "must be at most 3"),
        (values.integer(1), "1.5", "must be a whole number"),
        (values.number(0), "nan", "must be finite"),
        (values.number(0), "inf", "must be finite"),
        (values.number(0, 1), "1.25", "must be at most 1"),
        (values.number(0), "fast", "must be a number"),
        (values.positive, "0", "must be above 0"),
        (values.integers, "3,,4", "must be a whole number"),
        (values.integers, "3,-4", "must be at least 0"),
        (values.choice([("red", 1), ("blue", 2)]), "green", "must be one of red, blue"),
        (values.listen_address, "localhost", "must be host:port or unix:PATH"),
        (values.listen_address, "127.0.0.1:65536", "port must be in"),
        (values.listen_address, "unix:", "needs a path"),
        (values.listen_address, "unix:/absent-folder/socket", "which is not a directory"),
        (values.target_address, "127.0.0.1:0", "must name a port above 0"),
        (values.directory, "/absent-folder", "is not a directory"),
    ],
)
def test_bad_text_is_refused_with_the_rule(parse: Callable[[str], object], text: str, rule: str) -> None:
    """The message of a refusal is the rule, ready to follow the name of the flag."""
    with pytest.raises(ValueError, match=rule):
        parse(text)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "host.local:50051", "[::1]:7", "unix:/tmp.sock"])
def test_address_is_kept_as_it_was_given(address: str) -> None:
    """A good address is handed on unchanged."""
    assert values.listen_address(address) == address


def test_file_to_write_lies_in_a_directory_that_exists(tmp_path: Path) -> None:
    """A typing error in a path is found before a model is loaded; the file itself may be there or not."""
    (tmp_path / "old").touch()

    assert values.new_file(f"{tmp_path}/old") == f"{tmp_path}/old"
    assert values.new_file(f"{tmp_path}/new") == f"{tmp_path}/new"
    for wrong in (f"{tmp_path}/nowhere/new", str(tmp_path)):
        with pytest.raises(ValueError, match="director"):
            values.new_file(wrong)


def test_target_may_lie_in_a_directory_that_comes_later(tmp_path: Path) -> None:
    """Whoever is reached may start after whoever reaches."""
    assert values.target_address(f"unix:{tmp_path}/later/s") == f"unix:{tmp_path}/later/s"
    assert values.listen_address(f"unix:{tmp_path}/s") == f"unix:{tmp_path}/s"


@pytest.mark.parametrize(("num_bytes", "text"), [(256 << 20, "256MiB"), (3 << 30, "3GiB"), (1000, "1000")])
def test_size_is_written_in_the_largest_unit_that_divides_it(num_bytes: int, text: str) -> None:
    """What help prints can be given back as a flag."""
    assert values.size_text(num_bytes) == text
    assert values.size(1)(text) == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(7, "7 B"), (39040, "38.1 KiB"), (268431360, "256.0 MiB"), (5 << 29, "2.5 GiB")]
)
def test_size_for_people_has_one_decimal(num_bytes: int, text: str) -> None:
    """What was measured is rounded; what was configured is not."""
    assert values.rounded_size(num_bytes) == text
