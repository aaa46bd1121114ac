"""Factories by name: built in, installed, or one's own; every fault is told before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from common.engine.registry import ENGINE_GROUP, Kind, find, make
from common.engine.setup import EngineSetup
from common.errors import ConfigError, UnsupportedModel
from tests.support.setups import make_setup


def built_in(setup: EngineSetup) -> str:
    """Stand for an engine."""
    return f"built in, {setup.threads} threads"


KIND: Kind[EngineSetup, str] = Kind("engine", ENGINE_GROUP, {"torch": built_in})


def kind_of(factory: Callable[[EngineSetup], str]) -> Kind[EngineSetup, str]:
    """Return a table with one engine."""
    return Kind("engine", ENGINE_GROUP, {"npu": factory})


def point(name: str, value: str) -> EntryPoint:
    """Return what an installed package says."""
    return EntryPoint(name, value, ENGINE_GROUP)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that can be imported and that nobody has imported before."""
    name = f"npu_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "class Maker:\n"
        "    @staticmethod\n"
        "    def make(setup):\n"
        "        return f'npu, {setup.threads} threads'\n"
        "NOTHING = 5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return name


def test_a_built_in_name_needs_no_package() -> None:
    """And no package can hide it."""
    factory = find(KIND, "torch", installed=[point("torch", "elsewhere:make")])

    assert factory(make_setup()) == "built in, 1 threads"


def test_a_name_of_an_installed_package_is_found(package: str) -> None:
    """It is imported when it is asked for, and not before."""
    installed = [point("npu", f"{package}:Maker.make"), point("other", "no_such_module:make")]

    assert find(KIND, "npu", installed=installed)(make_setup()) == "npu, 1 threads"


def test_a_factory_is_found_by_its_place(package: str) -> None:
    """While it is written it needs no package."""
    assert find(KIND, "torch", f"{package}:Maker.make", [])(make_setup()) == "npu, 1 threads"


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    """Built in and installed ones alike."""
    with pytest.raises(ConfigError, match=r"engine=gpu: there is none of that name; known: torch, npu"):
        find(KIND, "gpu", installed=[point("npu", "npu:make")])


def test_a_name_that_two_packages_have_is_refused() -> None:
    """Which one computes must not depend on the order of a folder."""
    with pytest.raises(ConfigError, match=r"two packages have one of that name: a:make and b:make"):
        find(KIND, "npu", installed=[point("npu", "b:make"), point("npu", "a:make")])


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("no_such_module:make", "cannot be imported: .*no_such_module"),
        ("json:no_such_name", "cannot be imported: .*no_such_name"),
        ("json", "is not module:callable"),
        (":make", "is not module:callable"),
        ("sys:maxsize", "is a int, which cannot be called"),
    ],
)
def test_a_factory_that_is_none_is_refused_by_its_place(factory: str, problem: str) -> None:
    """The flag, what was given, and why."""
    with pytest.raises(ConfigError, match=problem) as refused:
        find(KIND, "torch", factory, [])

    assert (refused.value.field, refused.value.value) == ("engine_factory", factory)


def test_what_a_factory_raises_is_told_by_its_name() -> None:
    """One line, whatever a device says; an error of ours says already what is wrong."""

    def breaks(setup: EngineSetup) -> str:
        raise RuntimeError("no device")

    def refuses(setup: EngineSetup) -> str:
        raise UnsupportedModel("m", ["3:mamba"], "state")

    def leaves(setup: EngineSetup) -> str:
        raise SystemExit(7)

    with pytest.raises(ConfigError, match="engine=npu: cannot be made: SystemExit: 7"):
        make(kind_of(leaves), "npu", "", make_setup())
    with pytest.raises(ConfigError, match=r"engine=npu: cannot be made: .*no device"):
        make(kind_of(breaks), "npu", "", make_setup())
    with pytest.raises(UnsupportedModel):
        make(kind_of(refuses), "npu", "", make_setup())
