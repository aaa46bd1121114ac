"""What may stand where: doors, docstrings, sizes and the table of errors."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from common import errors
from common.wire.status import CODES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "decode_service", "kvspan", "prefill_service")
STUBS = "kvspan/v1/*"

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

COMPUTE = ("common/model/*", "prefill_service/engines/*", "decode_service/generate/backends/*")
"""Where models live and run."""

COMPOSITION_ROOTS = ("prefill_service/app.py", "decode_service/app.py")
"""Open and close everything."""

DOORS = {
    "torch": (
        *COMPUTE,
        "decode_service/cache/storage.py",
        "decode_service/generate/sampling.py",
    ),
    "transformers": COMPUTE,
    "grpc": (
        "common/wire/*",
        *COMPOSITION_ROOTS,
        "prefill_service/servicer.py",
        "decode_service/api/servicer.py",
        "decode_service/prefill/peer_connection.py",
        "kvspan/client.py",
        # Commands that are clients of both services.
        "kvspan/commands/check.py",
        "kvspan/commands/remote.py",
    ),
}
"""Which files may import a library when they run; annotations may name its types anywhere."""


ELSEWHERE = frozenset(
    {
        "multiprocessing",
        "shared_memory",
        "noun",
        "past_verb",
        "_UNSPECIFIED",
        "KVSPAN_SLAB_BYTES",
        "localhost",
    }
)
"""Words that docstrings quote and that are no names of ours: of a library, of a pattern, made at run time."""


@cache
def sources() -> tuple[Path, ...]:
    """Return every source file but the stubs."""
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple(path for path in found if not fnmatch(name_of(path), STUBS))


def name_of(path: Path) -> str:
    """Return the path of a file from the root of the project."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def imports_of(node: ast.AST) -> Iterator[str]:
    """Yield the full name of every module imported at run time, wherever in the file."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
    is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for child in () if is_for_types else ast.iter_child_nodes(node):
        yield from imports_of(child)


def imports_library(path: Path, library: str) -> bool:
    """Tell whether a file imports a top-level package or a part of it."""
    return any(name.partition(".")[0] == library for name in imports_of(tree_of(path)))


def leaves(base: type[Exception]) -> Iterator[type[Exception]]:
    """Yield the classes of errors.py below `base` that have none below them."""
    below = [cls for cls in base.__subclasses__() if cls.__module__ == errors.__name__]
    if not below:
        yield base
    for cls in below:
        yield from leaves(cls)


@pytest.mark.parametrize("library", DOORS)
def test_library_is_imported_only_behind_its_door(library: str) -> None:
    """A rule that can be tested without a library lives in a file that does not import it."""
    importers = [name_of(path) for path in sources() if imports_library(path, library)]

    assert [name for name in importers if not any(fnmatch(name, door) for door in DOORS[library])] == []


def test_services_never_import_each_other() -> None:
    """The two services share common/ and the contract, and nothing of each other."""
    pairs = (("prefill_service", "decode_service"), ("decode_service", "prefill_service"))
    crossings = [
        f"{name_of(path)} imports {other}"
        for service, other in pairs
        for path in sources()
        if path.relative_to(ROOT).parts[0] == service and imports_library(path, other)
    ]

    assert crossings == []


def test_every_module_says_what_it_answers() -> None:
    """A reader finds rule, owner and unit without leaving the file; an empty package has nothing to say."""
    silent = [
        name_of(path) for path in sources() if tree_of(path).body and not ast.get_docstring(tree_of(path))
    ]

    assert silent == []


def test_docstrings_name_only_what_is_there() -> None:
    """A name in backticks is a file beside the module or from the root on, or occurs in code or contract."""
    contract = "".join(path.read_text() for path in (ROOT / "protos").rglob("*.proto"))
    known = {*ELSEWHERE, *dir(builtins), *re.findall(r"\w+", contract)}
    known.update(word for path in sources() for word in words_of(tree_of(path), name_of(path)))
    strange = [
        f"{name_of(path)}: {quoted}"
        for path in sources()
        for text in docstrings_of(tree_of(path))
        for quoted in re.findall(r"`([^`]+)`", text)
        if not is_there(path, quoted, known)
    ]

    assert strange == []


def is_there(near: Path, quoted: str, known: set[str]) -> bool:
    """Tell whether a quoted path exists, or all words of what is no path are known."""
    if re.fullmatch(r"[\w.-]+(/[\w.-]*)+|\w+\.(py|md|proto|toml|yaml)", quoted):
        return any((folder / quoted).exists() for folder in (ROOT, near.parent))
    return set(re.findall(r"\b[A-Za-z_]\w+", quoted)) <= known


def docstrings_of(tree: ast.Module) -> Iterator[str]:
    """Yield the texts that stand alone: of a module, a class, a function or a field."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def words_of(tree: ast.Module, name: str) -> Iterator[str]:
    """Yield the names that a file defines or uses, and the words of its texts that are no docstrings."""
    yield from re.findall(r"\w+", name.removesuffix(".py"))
    standing = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in standing:
            yield from re.findall(r"\w+", node.value)
        for field in ("id", "attr", "name", "arg", "module", "asname"):
            yield from re.findall(r"\w+", str(getattr(node, field, "")))


def test_no_file_is_too_long_to_read() -> None:
    """A file has one concept; above the limit it has two."""
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in sources()}

    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_is_too_long_to_read() -> None:
    """Above the limit a function does two things."""
    too_long = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]

    assert too_long == []


def test_every_error_has_a_code() -> None:
    """A leaf without an entry would reach its client as an internal error."""
    named = [*leaves(errors.KVSpanError), errors.InvariantViolation]

    assert len(named) > 20
    assert [cls.__name__ for cls in named if cls not in CODES] == []


def test_every_reason_is_its_own() -> None:
    """A client tells errors apart by their reason: upper snake case, at most 63 characters."""
    reasons = [cls.code for cls in leaves(errors.KVSpanError) if issubclass(cls, errors.KVSpanError)]

    assert len(set(reasons)) == len(reasons)
    assert [reason for reason in reasons if not reason.replace("_", "").isupper() or len(reason) > 63] == []
