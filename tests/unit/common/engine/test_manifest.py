"""Tests of common/engine/manifest.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.engine.identity import EngineIdentity
from common.engine.manifest import MAX_BYTES, read_manifest, write_manifest
from common.errors import ConfigError
from common.kv.geometry import DType, KVGeometry, LayerGeometry
from common.session.identity import ModelFingerprint, Origin

IDENTITY = EngineIdentity(
    model_name="small",
    fingerprint=ModelFingerprint("c0", "ab", "70", "4d"),
    config_fields=(("hidden_size", "72"), ("model_type", '"llama"')),
    tokenizer_fields=(("normalizer", "null"),),
    geometry=KVGeometry(
        (LayerGeometry(0, 3, 12, DType.FLOAT32, None), LayerGeometry(2, 3, 12, DType.BFLOAT16, 32)), 259
    ),
)


def test_what_was_written_is_read_and_declared(tmp_path: Path) -> None:
    """Every field comes back; only how it is known differs."""
    write_manifest(tmp_path / "manifest.json", IDENTITY, "a builder 1.2")

    assert read_manifest(tmp_path / "manifest.json") == replace(IDENTITY, origin=Origin.DECLARED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format is not 1"),
        ({"format": True}, "format is no whole number"),
        ({"builder": None}, "builder is no text"),
        ({"model_name": 3}, "model_name is no text"),
        ({"fingerprint": {"config": "c0"}}, "fingerprint has config, it needs config, rounded_weights"),
        ({"fingerprint": "c0"}, "fingerprint has str"),
        ({"config_fields": []}, "config_fields is no object"),
        ({"tokenizer_fields": {"a": 1}}, "tokenizer_fields has values that are no texts"),
        ({"vocab_size": 0}, "vocab_size is no whole number within [1,"),
        ({"vocab_size": 259.0}, "vocab_size is no whole number"),
        ({"layers": {}}, "layers is no list"),
        ({"layers": []}, "layers a geometry needs at least one"),
        ({"layers": [{"head_dim": 12}]}, "layers[0] has head_dim"),
        ({"extra": 1}, "has builder, config_fields, extra"),
    ],
)
def test_a_field_that_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """Whoever repairs a manifest learns which field it is, and what is the matter."""
    path = tmp_path / "manifest.json"
    write_manifest(path, IDENTITY, "a builder")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    with pytest.raises(ConfigError) as refused:
        read_manifest(path)

    assert words in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("layer_index", -1, "layers[1].layer_index is no whole number within [0,"),
        ("layer_index", 0, "layers layer indices must ascend"),
        ("num_kv_heads", 0, "layers[1].num_kv_heads is no whole number within [1,"),
        ("head_dim", "12", "layers[1].head_dim is no whole number"),
        ("dtype", "int8", "layers[1].dtype is none of bfloat16, float16, float32"),
        ("window", 0, "layers[1].window is no whole number within [1,"),
    ],
)
def test_a_layer_that_is_wrong_is_named(tmp_path: Path, field: str, value: object, words: str) -> None:
    """A size that no layer can have never reaches a session."""
    path = tmp_path / "manifest.json"
    write_manifest(path, IDENTITY, "a builder")
    said = json.loads(path.read_text())
    said["layers"][1][field] = value
    path.write_text(json.dumps(said))

    with pytest.raises(ConfigError) as refused:
        read_manifest(path)

    assert words in str(refused.value)


@pytest.mark.parametrize("digest", ["", "XY", 5])
def test_a_digest_that_is_none_is_refused(tmp_path: Path, digest: object) -> None:
    """It would be compared with that of a peer, and shown to people."""
    path = tmp_path / "manifest.json"
    write_manifest(path, IDENTITY, "a builder")
    said = json.loads(path.read_text())
    said["fingerprint"]["weights"] = digest
    path.write_text(json.dumps(said))

    with pytest.raises(ConfigError, match=r"fingerprint\.weights is no"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", "is no JSON"), (b"\xff", "is no JSON"), (b"[" * 100_000, "is no JSON"), (b"[]", "list")],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """A file that was cut, or is another one, is an error of configuration and no traceback."""
    path = tmp_path / "manifest.json"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=words):
        read_manifest(path)


def test_a_manifest_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """Its size is looked at first."""
    path = tmp_path / "manifest.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)

    with pytest.raises(ConfigError, match=f"has {MAX_BYTES + 1} bytes, the limit is {MAX_BYTES}"):
        read_manifest(path)


def test_a_manifest_that_is_not_there_is_named(tmp_path: Path) -> None:
    """An artefact without one has no identity."""
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        read_manifest(tmp_path / "manifest.json")
