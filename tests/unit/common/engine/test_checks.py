"""What an engine or a backend says of itself is held against itself before anything is listened on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.engine.checks import backend_problems, check_backend, check_engine, engine_problems
from common.engine.decode import BackendDescription
from common.engine.prefill import EngineDescription
from common.errors import ConfigError
from tests.support.factories import make_geometry
from tests.support.fakes import CountingBackend, PatternEngine, make_engine_identity

GEOMETRY = make_geometry(num_layers=6)
GOOD = EngineDescription("npu", ("npu 3",), 512, widths=(128, 512), layer_stops=(2, 4))


def test_what_is_built_in_is_taken() -> None:
    """The fakes of the tests are engines and backends like any other."""
    check_engine("engine", "pattern", PatternEngine(GEOMETRY))
    check_backend("backend", "counting", CountingBackend(GEOMETRY))
    assert list(engine_problems(make_engine_identity(GEOMETRY), GOOD)) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": ""}, "no name"),
        ({"numerics": ()}, "numerics is ()"),
        ({"numerics": ("",)}, "numerics is"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens is 0"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"widths": (512, 128)}, "widths are (512, 128)"),
        ({"widths": (512, 512)}, "widths are (512, 512)"),
        ({"widths": (0, 512)}, "widths are (0, 512)"),
        ({"max_prompt_tokens": 513}, "its largest width 512"),
        ({"layer_stops": (0,)}, "layer_stops are (0,), its layers 0 to 5"),
        ({"layer_stops": (6,)}, "layer_stops are (6,)"),
        ({"layer_stops": (4, 2)}, "layer_stops are (4, 2)"),
        ({"longest_step_ms": -1}, "longest_step_ms is -1"),
    ],
)
def test_a_description_that_contradicts_itself_is_told(change: dict[str, Any], problem: str) -> None:
    """The field and its value."""
    (found,) = engine_problems(make_engine_identity(GEOMETRY), replace(GOOD, **change))

    assert problem in found


@pytest.mark.parametrize(
    ("name", "numerics", "lanes", "problem"),
    [
        ("", ("npu",), 1, "no name"),
        ("b", ("npu",), 0, "max_lanes is 0"),
        ("b", (), 1, "numerics is ()"),
        ("b", ("",), 1, "numerics is"),
    ],
)
def test_a_backend_that_contradicts_itself_is_told(
    name: str, numerics: tuple[str, ...], lanes: int, problem: str
) -> None:
    """The field and its value."""
    (found,) = backend_problems(BackendDescription(name, numerics, lanes))

    assert problem in found


class Unready:
    """Has no prefill."""

    def identity(self) -> object:
        """Say something else."""
        return "tiny"

    def describe(self) -> EngineDescription:
        """Say what is right."""
        return GOOD


class Vague(Unready):
    """Has all methods."""

    def prefill(self) -> None:
        """Compute nothing."""


class Silent(Vague):
    """Cannot say what it is."""

    def describe(self) -> EngineDescription:
        """Break."""
        raise RuntimeError("no device")


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (Unready(), "which lacks prefill"),
        (Vague(), "says a str where it has to say a EngineIdentity"),
        (Silent(), "cannot say what it is: .*no device"),
        (None, "NoneType, which lacks identity, describe, prefill"),
    ],
)
def test_what_is_no_engine_is_refused_by_name(engine: object, problem: str) -> None:
    """Before it is asked for a prompt."""
    with pytest.raises(ConfigError, match=problem) as refused:
        check_engine("engine", "npu", engine)

    assert (refused.value.field, refused.value.value) == ("engine", "npu")


@pytest.mark.parametrize(
    "change",
    [{"widths": ("a", 2)}, {"max_prompt_tokens": "9"}, {"layer_stops": None}, {"longest_step_ms": None}],
)
def test_a_value_of_another_type_is_refused_by_name(change: dict[str, Any]) -> None:
    """Whatever comparing it raises: one line, and no traceback."""

    class Odd(PatternEngine):
        def describe(self) -> EngineDescription:
            return replace(GOOD, **change)

    with pytest.raises(ConfigError, match="engine=npu: has a value of another type in its description"):
        check_engine("engine", "npu", Odd(GEOMETRY))
