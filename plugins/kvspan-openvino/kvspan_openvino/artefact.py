"""Converted models in kvspan's cache: found again by what they were made from, whole or not at all.

Theory of operation: a folder is named after the digest of a *recipe*: the checkpoint, the parts and the
versions of what converts. `artefact.json` in it holds the recipe, facts about the model, and size and digest
of every other file; all of it is checked each time, so that what was damaged, or put there under another
name, is not used: it is made anew, and the log says why. A folder is written under a name of its own and then
renamed, by one process at a time. What others can write is refused.

Not here: making one (`convert.py`), who the model is (`manifest.json`, `common/engine/manifest.py`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from common.errors import ConfigError
from common.own_file import folder_problem, open_own

logger = logging.getLogger(__name__)

FACTS_FILE = "artefact.json"
MANIFEST_FILE = "manifest.json"
FORMAT = "2"
"""Raise it whenever the conversion changes what it writes."""

_PREFIX = "openvino-"
_SCRATCH = f".{_PREFIX}"
_LOCK = f".{_PREFIX}lock"
_READ_BYTES = 8 << 20
_MAX_FACTS_BYTES = 1 << 20

Recipe = Mapping[str, str]
"""What decides a converted model; equal recipes make equal ones."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the engine has to know of a converted model, beside who it is."""

    hidden_size: int
    num_layers: int
    max_context: int
    """Tokens of prompt and output together that the config says."""

    max_stretched: int
    """As many as its position encoding can be stretched to."""


Kept = tuple[Path, Facts]
"""The folder of a converted model that is whole, and what is known of it."""


def part_file(part: int) -> str:
    """Return the name of a part; its weights lie beside it, in .bin."""
    return f"part-{part}.xml"


def folder_name(recipe: Recipe) -> str:
    """Return the name of the folder of a recipe."""
    return _PREFIX + _digest(dict(recipe))


def file_digest(path: Path) -> str:
    """Return the digest of a file. Raises: `OSError`."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def seal(folder: Path, recipe: Recipe, facts: Facts) -> None:
    """Say in a finished folder what it is, and bring all of it to the disk. Raises: `OSError`."""
    names = sorted(path.name for path in folder.iterdir())
    files = {name: [(folder / name).stat().st_size, file_digest(folder / name)] for name in names}
    said = {"recipe": dict(recipe), "facts": asdict(facts), "files": files}
    text = json.dumps({**said, "digest": _digest(said)}, indent=1)
    (folder / FACTS_FILE).write_text(text, encoding="utf-8")
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(folder: Path, recipe: Recipe) -> Facts:
    """Return the facts of a folder that is whole and was made from this recipe.

    Raises: `ValueError` that says what is wrong with it, `OSError` when a file cannot be read.
    """
    said = _read_facts(folder / FACTS_FILE)
    if said["recipe"] != dict(recipe):
        raise ValueError(f"{FACTS_FILE} is of another model or conversion")
    files = said["files"]
    there = {path.name for path in folder.iterdir()} - {FACTS_FILE}
    if MANIFEST_FILE not in files or set(files) != there:
        odd = sorted(set(files) ^ there) or [MANIFEST_FILE]
        raise ValueError(f"{FACTS_FILE} and the folder differ by {', '.join(odd)}")
    for name, (size, digest) in files.items():
        found = (folder / name).stat().st_size
        if found != size:
            raise ValueError(f"{name} has {found} bytes, {size} were written")
        if file_digest(folder / name) != digest:
            raise ValueError(f"{name} is not what was written")
    return Facts(**said["facts"])


def kept(cache: Path, recipe: Recipe, make: Callable[[Path], None]) -> Kept:
    """Return the folder of a recipe; `make` fills an empty one, which it has to `seal`, when there is none.

    Raises: `ConfigError` when the cache cannot be written or others can write it; what `make` raises.
    """
    folder = cache / folder_name(recipe)
    try:
        if (found := _whole(folder, cache, recipe)) is not None:
            return folder, found
        cache.mkdir(0o700, parents=True, exist_ok=True)
        _refuse_foreign(cache)
        with _one_at_a_time(cache):
            if (found := _whole(folder, cache, recipe)) is not None:
                return folder, found
            with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=cache) as scratch:
                made = Path(scratch) / folder.name
                made.mkdir(0o700)
                make(made)
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
            return folder, read(folder, recipe)
    except OSError as error:
        raise ConfigError("KVSPAN_CACHE", cache, f"cannot keep the converted model there: {error}") from error


def _whole(folder: Path, cache: Path, recipe: Recipe) -> Facts | None:
    """Return the facts of a folder that can be used; None when it has to be made."""
    if not folder.exists():
        return None
    _refuse_foreign(cache)
    _refuse_foreign(folder)
    try:
        return read(folder, recipe)
    except (OSError, ValueError) as error:
        logger.warning("openvino.artefact_unusable folder=%s problem=%s", folder, error)
        return None


def _refuse_foreign(folder: Path) -> None:
    if problem := folder_problem(folder):
        raise ConfigError("KVSPAN_CACHE", folder, problem)


@contextmanager
def _one_at_a_time(cache: Path) -> Iterator[None]:
    """Hold the lock of all conversions; whoever has it removes what killed ones left."""
    file = open_own(cache / _LOCK, os.O_RDWR)
    try:
        # Without locks of the file system two convert at once, and the second replaces what the first made.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            for left in cache.glob(f"{_SCRATCH}*/"):
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(file)


def _read_facts(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_FACTS_BYTES:
        raise ValueError(f"{path.name} is larger than {_MAX_FACTS_BYTES} bytes")
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON") from error
    # Nothing in it is believed before the digest says that it is what `seal` wrote.
    undigested = (
        {key: value for key, value in said.items() if key != "digest"} if isinstance(said, dict) else {}
    )
    if not undigested or said.get("digest") != _digest(undigested):
        raise ValueError(f"{path.name} is not what was written")
    return undigested


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
