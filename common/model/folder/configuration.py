"""Whether a config.json is one that a model can be made from, told from its text alone.

Theory of operation: libraries check the types of what they declare, and then compute with zero layers, with
NaN, or with 10^12 rows until memory ends. So the file is read within bounds of size and depth, and what every
decoder has (sizes, heads, layers, positions) is held against bounds and against itself, before any library
is loaded. What a config means is not judged here.

Not here: the weights it stands beside (`checkpoint.py`), what can be served (`common/model/describe.py`,
`common/model/positions.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.excerpt import excerpt
from common.model.folder.files import CONFIG

MAX_BYTES = 8 << 20
"""A hundred times more than the longest public ones, with their lists of labels."""

MAX_DEPTH = 16
"""Public ones nest four or five deep."""

_SIZES = {
    "num_hidden_layers": 1 << 12, "hidden_size": 1 << 24, "intermediate_size": 1 << 27, "vocab_size": 1 << 31,
    "num_attention_heads": 1 << 16, "num_key_value_heads": 1 << 16, "head_dim": 1 << 16,
    "max_position_embeddings": 1 << 31, "num_labels": 1 << 18,
}  # fmt: skip
"""Whole numbers from one on, and the largest that is believed; the weights bound them further."""

_MOST_OF_ANYTHING = 1 << 18
"""Labels, experts, codebooks: a library makes an object of each, whether anybody asks for it or not."""

_OPTIONAL = frozenset({"num_key_value_heads", "head_dim", "intermediate_size"})
"""Sizes that may be null: the model type then derives them."""

_POSITIVE = frozenset(
    {
        "rope_theta", "partial_rotary_factor", "query_pre_attn_scalar",
        "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps",
    }
)  # fmt: skip
"""Numbers that a sum or a root is divided by, or that positions are scaled by."""

_STORED = ("bfloat16", "float16", "float32", "float64", "half", "float", "double")
"""Element types that weights may be stored in; what they are computed in is the service's."""

_LARGEST = 1 << 53
"""Whole numbers beyond are not the same for everybody who reads JSON."""


class _Wrong(Exception):
    """Says what is wrong; the message begins with a key."""


def read_config(spec: str, folder: Path) -> dict[str, Any]:
    """Return what config.json of `folder`, which was given as `spec`, says.

    Raises ConfigError that names the key and its value, both where two contradict each other.
    """
    try:
        with (folder / CONFIG).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        config = _parsed(content)
        for where, part in _parts(config, "", 1):
            _check_part(where, part)
    except (_Wrong, OSError, ValueError, RecursionError) as error:
        raise ConfigError("model", spec, f"{CONFIG}: {excerpt(str(error), 400)}") from error
    return config


def _parsed(content: bytes) -> dict[str, Any]:
    if len(content) > MAX_BYTES:
        raise _Wrong(f"is longer than {MAX_BYTES} bytes")
    try:
        config = json.loads(content, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise _Wrong(f"is no JSON object but {_shown(config)}")
    return config


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; libraries take the last of two values of a key without a word."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise _Wrong(f"{_shown(key)} is there twice, as {_shown(content[key])} and {_shown(value)}")
        content[key] = value
    return content


def _parts(value: Any, where: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object with the path to it; raises `_Wrong` where they nest too deep."""
    if depth > MAX_DEPTH:
        raise _Wrong(f"{where} is more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        yield where, value
        for key, item in value.items():
            yield from _parts(item, f"{where}.{key}" if where else str(key), depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _parts(item, f"{where}[{index}]", depth + 1)


def _check_part(where: str, part: dict[str, Any]) -> None:
    prefix = f"{where}." if where else ""
    for key, value in part.items():
        try:
            _check_value(key, value)
        except _Wrong as wrong:
            raise _Wrong(f"{prefix}{wrong}") from None
    for problem in _contradictions(part):
        raise _Wrong(f"{prefix}{problem}")


def _check_value(key: str, value: Any) -> None:
    # Infinite bounds stand in lists of recurrent models, which are refused by their layers.
    if isinstance(value, float) and not math.isfinite(value):
        raise _Wrong(f"{key} is {value}, not a finite number")
    if type(value) is int and abs(value) > _LARGEST:
        raise _Wrong(f"{key} is {_shown(value)}, which is beyond {_LARGEST}")
    if key in _SIZES and not (value is None and key in _OPTIONAL):
        # One for each layer, where layers differ.
        for one in value if isinstance(value, list) else [value]:
            if type(one) is not int or not 1 <= one <= _SIZES[key]:
                raise _Wrong(f"{key} is {_shown(one)}, not a whole number from 1 to {_SIZES[key]}")
    if key.startswith("num_") and type(value) is int and value > _MOST_OF_ANYTHING:
        raise _Wrong(f"{key} is {value}, more than {_MOST_OF_ANYTHING}")
    if value is not None:
        _check_kind(key, value)


def _check_kind(key: str, value: Any) -> None:
    is_object = key.endswith("_config") or key in ("rope_scaling", "rope_parameters")
    if is_object and not isinstance(value, dict):
        raise _Wrong(f"{key} is {_shown(value)}, not an object")
    if key in ("architectures", "layer_types") and not _is_texts(value):
        raise _Wrong(f"{key} is {_shown(value)}, not a list of names")
    if key in ("dtype", "torch_dtype") and value not in _STORED:
        raise _Wrong(f"{key} is {_shown(value)}, not one of {', '.join(_STORED)}")
    # 0 or -1 stands for none where no layer has a window; else `common/model/refusals.py` judges.
    if key == "sliding_window" and not (type(value) is int and value <= 1 << 31):
        raise _Wrong(f"sliding_window is {_shown(value)}, not a whole number up to {1 << 31}")
    if key in _POSITIVE and not (type(value) in (int, float) and value > 0):
        raise _Wrong(f"{key} is {_shown(value)}, not a number above 0")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _contradictions(part: dict[str, Any]) -> Iterator[str]:
    """Yield what two keys of one object say against each other."""
    hidden, heads, kv_heads = map(part.get, ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        yield f"num_key_value_heads is {kv_heads}, which does not divide num_attention_heads, {heads}"
    if isinstance(heads, int) and isinstance(hidden, int) and not part.get("head_dim") and hidden % heads:
        yield f"num_attention_heads is {heads}, which does not divide hidden_size, {hidden} (no head_dim)"
    types, layers = part.get("layer_types"), part.get("num_hidden_layers")
    if isinstance(types, list) and isinstance(layers, int) and len(types) != layers:
        yield f"layer_types names {len(types)} layers, num_hidden_layers is {layers}"
    pad, rows = part.get("pad_token_id"), part.get("vocab_size")
    if isinstance(pad, int) and isinstance(rows, int) and pad >= rows:
        yield f"pad_token_id is {pad}, vocab_size is {rows}"
    yield from _position_contradictions(part)


def _position_contradictions(part: dict[str, Any]) -> Iterator[str]:
    """Yield where the old and the new spelling of positions differ; a library takes one of them."""
    old, new = part.get("rope_scaling"), part.get("rope_parameters")
    if old and new and old != new:
        yield f"rope_scaling is {_shown(old)}, rope_parameters is {_shown(new)}"
    theta = part.get("rope_theta")
    if isinstance(new, dict) and None is not theta != new.get("rope_theta", theta):
        yield f"rope_theta is {theta}, rope_parameters.rope_theta is {_shown(new['rope_theta'])}"
    kinds = part.get("type"), part.get("rope_type")
    # What transformers 4 wrote of positions in several dimensions, which are plain ones for text.
    if all(isinstance(kind, str) for kind in kinds) and kinds[0] not in (kinds[1], "mrope"):
        yield f"type is {_shown(kinds[0])}, rope_type is {_shown(kinds[1])}"


def _shown(value: Any) -> str:
    return excerpt(json.dumps(value), 80)
