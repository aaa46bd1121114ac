"""One line per event, its values as fields."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from common.telemetry.logging import LONGEST_VALUE, configure_logging, log_fields


@pytest.fixture(autouse=True)
def _restored_root() -> Iterator[None]:
    """Give the root logger back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_line_holds_service_event_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """A line is found by its event and read by its fields."""
    configure_logging("decode", "info")

    logging.getLogger("x").info("span.sealed", extra=log_fields(slot=7, generation=3))

    stamp, rest = capsys.readouterr().err.rstrip("\n").split(" ", 1)
    assert stamp.endswith("Z")
    assert rest == "INFO decode span.sealed slot=7 generation=3"


def test_value_is_quoted_when_it_could_end_its_field(capsys: pytest.CaptureFixture[str]) -> None:
    """A space, a quote or a line break in a value never looks like another field or line."""
    configure_logging("decode", "INFO")

    logging.getLogger("x").info("call.failed", extra=log_fields(problem='no "page"\nfree=3', empty=""))

    assert capsys.readouterr().err.endswith('call.failed problem="no \\"page\\"\\nfree=3" empty=""\n')


def test_value_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Peers and clients choose texts that stand in lines; what is printable stays as it is."""
    configure_logging("decode", "INFO")

    logging.getLogger("x").info("call.failed", extra=log_fields(problem="né\x9b2J\u2028"))

    assert capsys.readouterr().err.endswith('call.failed problem="né\\x9b2J\\u2028"\n')


def test_number_that_json_lacks_is_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Else whoever reads the line by the letter cannot."""
    configure_logging("decode", "INFO", json=True)

    logging.getLogger("x").info("cost.estimated", extra=log_fields(ratio=float("inf"), other=0.5))

    assert '"ratio": "inf", "other": 0.5' in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("value", ["x" * 3_000_000, ValueError("x" * 3_000_000)], ids=["text", "error"])
def test_value_has_a_limit(as_json: bool, value: object, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a client or a peer names, no line is as long as its message."""
    configure_logging("decode", "INFO", json=as_json)

    logging.getLogger("x").info("call.failed", extra=log_fields(problem=value))

    assert LONGEST_VALUE < len(capsys.readouterr().err) < LONGEST_VALUE + 200


def test_traceback_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """The text of an exception may be a peer's."""
    configure_logging("decode", "INFO")

    logging.getLogger("x").error("call.broken", exc_info=ValueError("one\x9b2J\ntwo\x1b[2J"))

    assert capsys.readouterr().err.endswith("ValueError: one\\x9b2J\ntwo\\x1b[2J\n")


def test_json_line_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """The other format has the same values, one object per line."""
    configure_logging("prefill", "DEBUG", json=True)

    logging.getLogger("common.x").debug("span.sealed", extra=log_fields(slot=7, layers=(0, 2), event="mine"))

    line = json.loads(capsys.readouterr().err)
    assert line.pop("time")
    assert line == {
        "level": "DEBUG",
        "service": "prefill",
        "logger": "common.x",
        "event": "span.sealed",
        "slot": 7,
        "layers": [0, 2],
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_traceback_is_kept(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """An unexpected error can be found in the log of the service."""
    configure_logging("decode", "INFO", json=as_json)

    try:
        raise ValueError("what went wrong")
    except ValueError:
        logging.getLogger("x").exception("call.broken")

    assert "ValueError: what went wrong" in capsys.readouterr().err


def test_event_below_the_level_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Events of every span are there only when asked for."""
    configure_logging("decode", "INFO")

    logging.getLogger("x").debug("span.sealed")

    assert capsys.readouterr().err == ""


def test_second_call_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    """A line is never written twice."""
    configure_logging("decode", "INFO")
    configure_logging("decode", "INFO", json=True)

    logging.getLogger("x").info("server.started")

    assert len(capsys.readouterr().err.splitlines()) == 1


def test_level_is_refused_when_it_is_none() -> None:
    """A wrong level is an error at the start, not a silent service."""
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging("decode", "loud")
