"""What the weight files of a folder hold is told from their heads, and what is never read is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.errors import ConfigError
from common.model.folder.checkpoint import INDEX, WEIGHTS, read_checkpoint

SPEC = "given"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 7\n"


def tensor(*shape: int, dtype: type = np.float32) -> Any:
    """Return zeros."""
    return np.zeros(shape, dtype)


def write_index(folder: Path, names: object) -> None:
    """Write an index that maps a tensor to each of the names."""
    found = {str(index): name for index, name in enumerate(names)} if isinstance(names, list) else names
    (folder / INDEX).write_text(json.dumps({"weight_map": found}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two parts behind an index."""
    save_file({"a.weight": tensor(3, 5)}, tmp_path / "model-1.safetensors")
    save_file({"b.weight": tensor(7)}, tmp_path / "model-2.safetensors")
    write_index(tmp_path, ["model-1.safetensors", "model-2.safetensors"])
    return tmp_path


def refusal(folder: Path, config: dict[str, Any] | None = None) -> str:
    """Return why the weights of a folder are refused."""
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(SPEC, folder, config or {})
    assert (caught.value.field, caught.value.value) == ("model", SPEC)
    return caught.value.problem


def test_heads_tell_all_tensors_of_all_parts(folder: Path) -> None:
    """One file wins over parts, as it does in transformers; the parts are then named."""
    parts = read_checkpoint(SPEC, folder, {})
    save_file({"c.weight": tensor(2)}, folder / WEIGHTS)
    whole = read_checkpoint(SPEC, folder, {})

    assert {name: (one.shape, one.dtype) for name, one in parts.tensors.items()} == {
        "a.weight": ((3, 5), "F32"),
        "b.weight": ((7,), "F32"),
    }
    assert (parts.num_elements, parts.notes) == (22, ())
    assert list(whole.tensors) == ["c.weight"]
    said = f"files that are not read: model-1.safetensors, model-2.safetensors, {INDEX}"
    assert whole.notes == (said,)


def _garbage(path: Path) -> None:
    path.write_bytes(b"x" * 99)


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"12345678")


def _no_head(path: Path) -> None:
    path.write_bytes((2).to_bytes(8, "little") + b"[]")


def _huge_head(path: Path) -> None:
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def _bad_entry(path: Path) -> None:
    head = b'{"a": {"dtype": "F32", "shape": "x", "data_offsets": [0]}}'
    path.write_bytes(len(head).to_bytes(8, "little") + head)


def _integers(path: Path) -> None:
    save_file({"b.weight": tensor(7, dtype=np.int8)}, path)


def _again(path: Path) -> None:
    save_file({"a.weight": tensor(3, 5)}, path)


def _pointer(path: Path) -> None:
    path.write_bytes(POINTER)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_garbage, "cannot load .*model-2.safetensors: no safetensors file, or part of one: 99 bytes"),
        (_half, "its head describes 28 bytes of tensors, 24 are there"),
        (_longer, "its head describes 28 bytes of tensors, 36 are there"),
        (_no_head, "its head is no JSON object"),
        (_huge_head, "no safetensors file, or part of one: 10 bytes, a head of 4611686018427387904"),
        (
            _bad_entry,
            r'cannot load .*model-2.safetensors: its head describes a by \{"dtype": "F32", "shape": "x"',
        ),
        (_integers, r"b\.weight is of type I8, not one of BF16, F16, F32, F64"),
        (_again, r"model-1\.safetensors and model-2\.safetensors both hold a\.weight"),
        (_pointer, r"model-2\.safetensors is a git-lfs pointer"),
        (Path.unlink, f"the folder lacks model-2.safetensors, which {INDEX} names"),
    ],
)
def test_part_that_is_broken_is_named(folder: Path, spoil: Callable[[Path], None], said: str) -> None:
    """Row Y7: half a download, a copy of another part, weights in few bits; nothing is allocated for it."""
    spoil(folder / "model-2.safetensors")

    with pytest.raises(ConfigError, match=said):
        read_checkpoint(SPEC, folder, {})


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["../model-1.safetensors"], 'names "../model-1.safetensors", not safetensors files of this folder'),
        (["/etc/passwd"], 'names "/etc/passwd", not safetensors'),
        (["model-1.bin"], 'names ["model-1.bin"], not safetensors'),
        ([], "names [], not safetensors"),
        ([3], "is no index of weights"),
        (5, "is no index of weights"),
    ],
)
def test_index_names_weights_of_its_folder_alone(folder: Path, names: object, said: str) -> None:
    """No file outside is opened, and no pickle."""
    write_index(folder, names)

    assert refusal(folder).startswith(f"{INDEX} {said}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pytorch_model.bin", "; pytorch_model.bin is not read: save it as safetensors"),
        ("consolidated.00.pth", "; consolidated.00.pth is not read"),
        ("last.ckpt", "; last.ckpt is not read"),
        ("flax_model.msgpack", "; flax_model.msgpack is not read"),
        ("model-Q4.gguf", "; model-Q4.gguf is not read"),
        ("adapter_config.json", "the folder has an adapter (adapter_config.json) and no model.safetensors"),
        (
            "README.md",
            "the folder has no weights, neither model.safetensors nor model.safetensors.index.json",
        ),
    ],
)
def test_what_is_there_instead_of_weights_is_named(tmp_path: Path, name: str, said: str) -> None:
    """Rows Y7 and Y8: pickles and other formats are refused by name and never opened."""
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")

    assert said in refusal(tmp_path)


def test_what_lies_beside_the_weights_is_said(folder: Path) -> None:
    """Row Y8: an adapter is not applied, pickles and parts that no index names are not opened."""
    for name in ("adapter_config.json", "adapter_model.bin", "pytorch_model.bin", "model-9.safetensors"):
        (folder / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    for name in ("config.json", "tokenizer.json", "README.md", ".gitattributes", "vocab.json", "merges.txt"):
        (folder / name).touch()

    assert read_checkpoint(SPEC, folder, {}).notes == (
        "the adapter beside the weights (adapter_config.json) is not applied",
        "files that are not read: model-9.safetensors, pytorch_model.bin",
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, the weights are 2 tensors"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000, the weights are 22 elements"),
        ({"text_config": {"hidden_size": 23}}, "hidden_size is 23, the weights are 22 elements"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            'quantization_config.quant_method is "gptq"; quantized weights are not served',
        ),
        (
            {"quantization_config": "x"},
            'quantization_config.quant_method is "x"; quantized weights are not served',
        ),
    ],
)
def test_config_for_other_weights_is_refused_before_a_model_is_made(
    folder: Path, config: dict[str, Any], said: str
) -> None:
    """Row Y11, and 10^9 rows: told from heads alone, in no time and no memory."""
    assert refusal(folder, config) == f"config.json: {said}"
