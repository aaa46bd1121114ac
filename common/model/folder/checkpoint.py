"""What the weight files of a folder hold, told from their heads alone, and what beside them is never read.

Theory of operation: weights are `model.safetensors`, or the parts that `model.safetensors.index.json` names.
Their heads say name, type and shape of every tensor, so that half a file, a tensor that lies in two of them,
or weights in few bits are found before any is loaded. Pickles are never opened: reading one can run code.
What a library would leave out without a word (an adapter, another format, a part that no index names) is
refused where nothing else is there, and listed for the log where it lies beside the weights.

Not here: whether the tensors are those of the model (`common/model/loader.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.excerpt import excerpt
from common.model.folder.files import check_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")

MAX_HEAD_BYTES = 8 << 20
"""Room for 80,000 tensors; the largest public models have less than a thousand in a file."""

MAX_INDEX_BYTES = 16 << 20
"""Twice that of the largest public model."""

_FLOATING = frozenset({"BF16", "F16", "F32", "F64"})

_KNOWN_BESIDE = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab*", "merges*", "*.model", "*chat_template*", "*.md", "*.txt", "*.jinja", "LICENSE*", ".*",
)  # fmt: skip
"""Files that are read elsewhere, that say how text becomes tokens, or that are for people."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    file: str
    dtype: str
    """As safetensors spells it."""

    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Return the product of the shape."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights of a folder."""

    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    notes: tuple[str, ...]
    """What lies beside the weights and is not read, for the log."""

    @property
    def num_elements(self) -> int:
        """Return the elements of all tensors."""
        return sum(tensor.num_elements for tensor in self.tensors.values())


def read_checkpoint(spec: str, folder: Path, config: Mapping[str, Any]) -> Checkpoint:
    """Return what the weight files in `folder`, which was given as `spec`, hold beside this config.json.

    Raises ConfigError that names the file, the tensor or the key.
    """
    _refuse_quantized(spec, folder, config)
    files = _weight_files(spec, folder)
    _refuse_other_file(spec, files, config)
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for name, tensor in _stored(spec, path):
            if name in tensors:
                problem = f"{tensors[name].file} and {path.name} both hold {excerpt(name)}"
                raise ConfigError("model", spec, problem)
            tensors[name] = tensor
    _check_bounds(spec, config, tensors)
    return Checkpoint(files, tensors, tuple(_notes(folder, files)))


def _weight_files(spec: str, folder: Path) -> tuple[Path, ...]:
    """Return the files to load, every one of them readable."""
    names = [WEIGHTS] if _is_there(folder / WEIGHTS) else _indexed(spec, folder)
    for name in names:
        if not _is_there(folder / name):
            raise ConfigError("model", spec, f"the folder lacks {excerpt(name)}, which {INDEX} names")
        check_file(spec, folder / name)
    return tuple(folder / name for name in names)


def _indexed(spec: str, folder: Path) -> list[str]:
    index = folder / INDEX
    if not _is_there(index):
        raise ConfigError("model", spec, _without_weights(folder))
    check_file(spec, index)
    try:
        with index.open("rb") as file:
            content = file.read(MAX_INDEX_BYTES + 1)
        if len(content) > MAX_INDEX_BYTES:
            raise ValueError(f"longer than {MAX_INDEX_BYTES} bytes")
        names = sorted(set(json.loads(content)["weight_map"].values()))
        outside = next((name for name in names if Path(name).name != name or name[:1] in "./"), None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{INDEX} is no index of weights: {excerpt(repr(error))}"
        raise ConfigError("model", spec, problem) from error
    if outside is not None or not all(name.endswith(".safetensors") for name in names) or not names:
        shown = excerpt(json.dumps(names if outside is None else outside))
        raise ConfigError("model", spec, f"{INDEX} names {shown}, not safetensors files of this folder")
    return names


def _without_weights(folder: Path) -> str:
    """Return why nothing in the folder is weights, naming what looks like some."""
    if any(_is_there(folder / name) for name in ADAPTER):
        return f"the folder has an adapter ({ADAPTER[0]}) and no {WEIGHTS}; merge it into its base model"
    others = _beside(folder, ())
    if others:
        shown = excerpt(", ".join(others))
        return f"the folder has no {WEIGHTS} nor {INDEX}; {shown} is not read: save it as safetensors"
    return f"the folder has no weights, neither {WEIGHTS} nor {INDEX}"


def _is_there(path: Path) -> bool:
    """Tell whether a name is taken, be it by a link that leads nowhere."""
    return path.exists() or path.is_symlink()


def _stored(spec: str, path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield name and form of every tensor of a file."""
    try:
        head, num_bytes = _head(path)
        end = 0
        for name, entry in head.items():
            if name != "__metadata__":
                tensor, stop = _tensor(path.name, name, entry)
                end = max(end, stop)
                yield name, tensor
        if end != num_bytes:
            raise ValueError(f"its head describes {end} bytes of tensors, {num_bytes} are there")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("model", spec, f"cannot load {path}: {excerpt(str(error))}") from error


def _tensor(file: str, name: str, entry: Any) -> tuple[StoredTensor, int]:
    """Return a tensor and where its bytes end."""
    try:
        tensor = StoredTensor(file, str(entry["dtype"]), tuple(map(int, entry["shape"])))
        stop = int(entry["data_offsets"][1])
    except (KeyError, TypeError, IndexError, ValueError, OverflowError) as error:
        raise ValueError(f"its head describes {excerpt(name)} by {excerpt(json.dumps(entry), 80)}") from error
    if name.endswith(".weight") and tensor.dtype not in _FLOATING:
        found, kinds = excerpt(tensor.dtype, 20), ", ".join(sorted(_FLOATING))
        raise ValueError(f"{excerpt(name)} is of type {found}, not one of {kinds}")
    return tensor, stop


def _head(path: Path) -> tuple[dict[str, Any], int]:
    """Return the head of a safetensors file and the bytes that follow it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEAD_BYTES):
            raise ValueError(f"no safetensors file, or part of one: {size} bytes, a head of {length}")
        head = json.loads(file.read(length))
    if not isinstance(head, dict):
        raise ValueError("its head is no JSON object")
    return head, size - 8 - length


def _refuse_other_file(spec: str, files: tuple[Path, ...], config: Mapping[str, Any]) -> None:
    """Refuse a config that sends the library to other weights than those looked at here."""
    named, read = config.get("transformers_weights"), WEIGHTS if files[0].name == WEIGHTS else INDEX
    if named not in (None, read):
        shown = excerpt(json.dumps(named))
        raise ConfigError("model", spec, f"config.json: transformers_weights is {shown}, not {read}")


def _check_bounds(spec: str, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse a config that is for far more than the weights hold, before a model of its size is made.

    Each layer has a tensor of its own at least, each row and column an element.
    """
    text = config.get("text_config")
    most = sum(tensor.num_elements for tensor in tensors.values())
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key, limit, unit in (
            ("num_hidden_layers", len(tensors), "tensors"),
            ("vocab_size", most, "elements"),
            ("hidden_size", most, "elements"),
        ):
            value = part.get(key)
            if isinstance(value, int) and value > limit:
                problem = f"config.json: {key} is {value}, the weights are {limit} {unit}"
                raise ConfigError("model", spec, problem)


def _refuse_quantized(spec: str, folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse weights in few bits: their products are not those whose rows are the same in every company."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            found = part.get(key)
            if found is not None:
                method = found.get("quant_method") if isinstance(found, Mapping) else found
                shown = excerpt(json.dumps(method))
                problem = f"config.json: {key}.quant_method is {shown}; quantized weights are not served"
                raise ConfigError("model", spec, problem)


def _notes(folder: Path, files: tuple[Path, ...]) -> Iterator[str]:
    if any(_is_there(folder / name) for name in ADAPTER):
        yield f"the adapter beside the weights ({ADAPTER[0]}) is not applied"
    others = [name for name in _beside(folder, files) if name not in ADAPTER]
    if others:
        yield f"files that are not read: {excerpt(', '.join(others), 400)}"


def _beside(folder: Path, files: tuple[Path, ...]) -> list[str]:
    """Return the names of files that are neither weights nor known, sorted."""
    read = {path.name for path in files}
    # One file wins over parts, whatever their index says.
    read |= {INDEX} if read and WEIGHTS not in read else set()
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in read and not any(path.match(pattern) for pattern in _KNOWN_BESIDE)
    )
