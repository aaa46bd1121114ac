"""Generate the stubs of the contract: `python scripts/generate_stubs.py [FOLDER]`.

Writes the stubs of every file in protos/ below FOLDER (default: the root of the project, so that the
committed stubs in kvspan/v1 are replaced). `tests/unit/test_stubs.py` compares the two.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpc_tools  # type: ignore[import-untyped]
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
WELL_KNOWN_PROTOS = Path(grpc_tools.__file__).parent / "_proto"


def generate(folder: Path) -> None:
    """Write the stubs of every contract file below `folder`, at the path of their package.

    Raises: `RuntimeError` when the compiler refuses a file; it has printed why.
    """
    sources = [str(path.relative_to(PROTOS)) for path in sorted(PROTOS.rglob("*.proto"))]
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    command = ["protoc", f"--proto_path={PROTOS}", f"--proto_path={WELL_KNOWN_PROTOS}", *outputs, *sources]
    status = protoc.main(command)
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


def main(arguments: list[str]) -> int:
    """Generate into the folder named by the first argument, or in place."""
    generate(Path(arguments[0]) if arguments else ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
