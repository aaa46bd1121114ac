"""Who an artefact is that was built from a checkpoint: its identity as a JSON file beside it.

Theory of operation: whoever builds an artefact for another runtime has the checkpoint at hand, and writes
down its digests, its fields and the KV that the artefact delivers. Whoever computes with the artefact reads
them and has an identity that is *declared*: it saw no weight. A manifest is a file like any other: its size
is bounded before it is read, and each field is checked and named when it is wrong.

Not here: whether the artefact beside it is whole; that is for whoever keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from common.engine.identity import EngineIdentity
from common.errors import ConfigError
from common.excerpt import printable
from common.kv.geometry import DType, KVGeometry, LayerGeometry
from common.session.identity import ModelFingerprint, Origin

MAX_BYTES = 16 << 20
"""Of a manifest; each field of a tokenizer is cut to 64 KiB where it is made."""

_FORMAT = 1
_MAX_SIZE = 1 << 31
_DIGESTS = ("config", "weights", "tokenizer", "rounded_weights")
_LAYER = frozenset({"layer_index", "num_kv_heads", "head_dim", "dtype", "window"})
_MANIFEST = frozenset(
    {
        "format",
        "builder",
        "model_name",
        "fingerprint",
        "config_fields",
        "tokenizer_fields",
        "layers",
        "vocab_size",
    }
)

T = TypeVar("T")


def write_manifest(path: Path, identity: EngineIdentity, builder: str) -> None:
    """Write who an artefact is; `builder` says, for people, what made it. Raises: `OSError`."""
    layers = [
        {
            "layer_index": layer.layer_index,
            "num_kv_heads": layer.num_kv_heads,
            "head_dim": layer.head_dim,
            "dtype": layer.dtype.value,
            "window": layer.window,
        }
        for layer in identity.geometry.layers
    ]
    said = {
        "format": _FORMAT,
        "builder": builder,
        "model_name": identity.model_name,
        "fingerprint": {name: getattr(identity.fingerprint, name) for name in _DIGESTS},
        "config_fields": dict(identity.config_fields),
        "tokenizer_fields": dict(identity.tokenizer_fields),
        "layers": layers,
        "vocab_size": identity.geometry.vocab_size,
    }
    path.write_text(json.dumps(said, indent=1), encoding="utf-8")


def read_manifest(path: Path) -> EngineIdentity:
    """Return the identity that a manifest declares.

    Raises: `ConfigError` that names the file and the field that is wrong.
    """
    said = _Fields(path, "", _read(path), _MANIFEST)
    if said.whole("format", 0, _MAX_SIZE) != _FORMAT:
        raise said.wrong("format", f"is not {_FORMAT}")
    said.text("builder")
    digests = said.inner("fingerprint", frozenset(_DIGESTS))
    return EngineIdentity(
        model_name=said.text("model_name"),
        fingerprint=ModelFingerprint(**{name: digests.digest(name) for name in _DIGESTS}),
        config_fields=said.texts("config_fields"),
        tokenizer_fields=said.texts("tokenizer_fields"),
        geometry=_geometry(said),
        origin=Origin.DECLARED,
    )


def _read(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError("manifest", path, f"has {size} bytes, the limit is {MAX_BYTES}")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("manifest", path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("manifest", path, "is no JSON") from error


def _geometry(said: _Fields) -> KVGeometry:
    layers = tuple(_layer(one) for one in said.items("layers", _LAYER))
    try:
        return KVGeometry(layers, said.whole("vocab_size", 1, _MAX_SIZE))
    except ValueError as error:
        raise said.wrong("layers", str(error)) from error


def _layer(said: _Fields) -> LayerGeometry:
    kinds = {kind.value: kind for kind in DType}
    dtype = said.text("dtype")
    if dtype not in kinds:
        raise said.wrong("dtype", f"is none of {', '.join(kinds)}")
    return LayerGeometry(
        said.whole("layer_index", 0, _MAX_SIZE),
        said.whole("num_kv_heads", 1, _MAX_SIZE),
        said.whole("head_dim", 1, _MAX_SIZE),
        kinds[dtype],
        None if said.is_none("window") else said.whole("window", 1, _MAX_SIZE),
    )


class _Fields:
    """A JSON object that has to have exactly some fields; knows where it stands, to name them."""

    def __init__(self, path: Path, place: str, value: Any, names: frozenset[str]) -> None:
        self._path = path
        self._place = place
        if not isinstance(value, dict) or set(value) != names:
            found = ", ".join(sorted(map(str, value))) if isinstance(value, dict) else type(value).__name__
            raise self.wrong("", f"has {printable(found)}, it needs {', '.join(sorted(names))}")
        self._values: dict[str, Any] = value

    def wrong(self, name: str, problem: str) -> ConfigError:
        where = ".".join(filter(None, (self._place, name)))
        return ConfigError("manifest", self._path, f"{where} {problem}".strip())

    def text(self, name: str) -> str:
        return self._checked(name, str, "text")

    def is_none(self, name: str) -> bool:
        return self._values[name] is None

    def whole(self, name: str, least: int, most: int) -> int:
        # True is a whole number to Python.
        value = None if isinstance(self._values[name], bool) else self._values[name]
        if not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"is no whole number within [{least}, {most}]")
        return value

    def digest(self, name: str) -> str:
        text = self.text(name)
        if not text or not set(text) <= set("0123456789abcdef"):
            raise self.wrong(name, "is no digest in lower-case hex")
        return text

    def texts(self, name: str) -> tuple[tuple[str, str], ...]:
        values: Mapping[str, Any] = self._checked(name, dict, "object")
        if not all(isinstance(value, str) for value in values.values()):
            raise self.wrong(name, "has values that are no texts")
        return tuple(sorted(values.items()))

    def inner(self, name: str, names: frozenset[str]) -> _Fields:
        return _Fields(self._path, ".".join(filter(None, (self._place, name))), self._values[name], names)

    def items(self, name: str, names: frozenset[str]) -> list[_Fields]:
        values = self._checked(name, list, "list")
        return [_Fields(self._path, f"{name}[{index}]", value, names) for index, value in enumerate(values)]

    def _checked(self, name: str, kind: type[T], called: str) -> T:
        value = self._values[name]
        if not isinstance(value, kind):
            raise self.wrong(name, f"is no {called}")
        return value
