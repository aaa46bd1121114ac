"""The example of docs/engines.md is an engine: it keeps the rules, is short, and serves."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvspan.cli import main
from kvspan.conformance import ENGINE_CHECKS, EngineSubject
from kvspan.conformance.checks import outcome_of
from tests.support.setups import make_setup

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"

MAX_LINES = 80


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the example as a module that can be imported."""
    source = next(block for block in blocks() if "class NumpyEngine" in block)
    (tmp_path / "numpy_engine.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "numpy_engine", raising=False)
    import numpy_engine  # type: ignore[import-not-found]

    module: ModuleType = numpy_engine
    return module


def blocks() -> list[str]:
    """Return the Python of the page."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_the_example_is_short() -> None:
    """An afternoon's work."""
    assert max(len(block.splitlines()) for block in blocks()) < MAX_LINES


def test_the_example_keeps_the_rules(example: ModuleType) -> None:
    """All but the comparison with a reference, of which there is none."""
    subject = EngineSubject(example.make_engine(make_setup(options=("layer_group=3",))), num_prompts=50)

    verdicts = {check.name: outcome_of(check, subject) for check in ENGINE_CHECKS}

    skipped = ("skip", ["there is no reference of this checkpoint"])
    assert {name: verdict for name, verdict in verdicts.items() if verdict[0] != "ok"} == {
        "reference": skipped
    }


def test_the_command_of_the_page_passes(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands there, run where the file is."""
    code = main(["conformance", "engine", "--engine-factory", "numpy_engine:make_engine"])

    out = capsys.readouterr().out
    assert (code, out.splitlines()[-1]) == (0, f"{len(ENGINE_CHECKS)} checks, 0 fail")


def test_a_failing_engine_ends_the_command_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    """And its check says what it saw."""
    code = main(
        ["conformance", "engine", "--engine-factory", "tests.conformance.test_broken_engines:make_deaf"]
    )

    out = capsys.readouterr().out
    assert code == 1
    assert "FAILS  cancel: a cancel is answered within the declared stretch\n       asked 0 times" in out


def test_a_name_that_is_none_ends_the_command_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Like any other wrong setting."""
    assert main(["conformance", "backend", "gpu"]) == 2
    assert "backend=gpu: there is none of that name" in capsys.readouterr().err
