"""The committed stubs are what the contract gives."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUBS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def read_stubs(folder: Path) -> dict[str, bytes]:
    """Return the content of every stub in `folder` by its name."""
    return {path.name: path.read_bytes() for pattern in STUBS for path in folder.glob(pattern)}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Generate the stubs with the command that made the committed ones."""
    folder = tmp_path_factory.mktemp("stubs")
    runpy.run_path(str(ROOT / "scripts" / "generate_stubs.py"))["generate"](folder)
    return read_stubs(folder / "kvspan" / "v1")


def test_committed_stubs_are_byte_for_byte_those_of_the_contract(generated: dict[str, bytes]) -> None:
    """Stubs change only with their proto; `make stubs` brings them back."""
    committed = read_stubs(ROOT / "kvspan" / "v1")

    assert sorted(committed) == sorted(generated)
    assert [name for name in committed if committed[name] != generated[name]] == []


def test_every_contract_file_has_its_stubs(generated: dict[str, bytes]) -> None:
    """Three stubs for each file of the contract, so that the comparison above compares all of them."""
    names = [path.stem for path in (ROOT / "protos" / "kvspan" / "v1").glob("*.proto")]

    assert len(names) >= 3
    assert len(generated) == len(STUBS) * len(names)
