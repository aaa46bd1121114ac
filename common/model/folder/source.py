"""Where a model comes from: a local folder, the demo model, or a tiny seeded one.

Theory of operation: a spec is one string. `demo` and `tiny:<family>` are reserved words; anything else is
a path to a Hugging Face folder. Nothing here or behind it ever asks a hub: what is not on this disk is an
error that says so.

Not here: how each kind is loaded (`common/model/loader.py`, `common/model/demo.py`, `common/model/tiny.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.model.folder.files import check_readable

_TINY_PREFIX = "tiny:"
_DEMO = "demo"


class SourceKind(enum.Enum):
    """How the model gets into memory."""

    FOLDER = "folder"
    DEMO = "demo"
    TINY = "tiny"


class TinyFamily(enum.Enum):
    """Architectures of which a tiny model can be made."""

    QWEN3 = "qwen3"
    GEMMA3 = "gemma3"
    LLAMA = "llama"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A parsed model spec."""

    spec: str
    """The text it was parsed from."""

    kind: SourceKind

    folder: Path | None = None
    """The checkpoint folder; only for FOLDER."""

    family: TinyFamily | None = None
    """Only for TINY."""

    @property
    def name(self) -> str:
        """Return what this model is called towards clients: a folder's own name, otherwise the spec."""
        return self.folder.name if self.folder is not None else self.spec


def parse_source(spec: str) -> ModelSource:
    """Return the source a spec stands for.

    Raises ConfigError when the spec is neither a reserved word nor a folder with a config.json, all of whose
    files that matter can be read.
    """
    if spec == _DEMO:
        return ModelSource(spec, SourceKind.DEMO)
    if spec.startswith(_TINY_PREFIX):
        return ModelSource(spec, SourceKind.TINY, family=_tiny_family(spec))
    return ModelSource(spec, SourceKind.FOLDER, folder=_checkpoint_folder(spec))


def _tiny_family(spec: str) -> TinyFamily:
    try:
        return TinyFamily(spec.removeprefix(_TINY_PREFIX))
    except ValueError:
        known = ", ".join(_TINY_PREFIX + family.value for family in TinyFamily)
        raise ConfigError("model", spec, f"no such tiny model; there are {known}") from None


def _checkpoint_folder(spec: str) -> Path:
    if not spec:
        raise ConfigError("model", spec, "give a local folder, demo, or tiny:<family>")
    try:
        folder = Path(spec).expanduser().resolve()
    except (RuntimeError, OSError) as error:
        raise ConfigError("model", spec, f"is no path: {error}") from error
    check_readable(spec, folder)
    return folder
