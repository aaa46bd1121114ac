"""What a folder says about generating: the tokens that end a sequence are obeyed, all else is named.

Theory of operation: a request says each value of its sampling, and what it leaves out has one default on
every model (`SamplingParams`). Defaults that the author of a model wrote into generation_config.json would
make the same request mean something else with another folder, so they are not used; that is said at start.

    end tokens  =  generation_config.json, else config.json  +  the end token of the tokenizer

Not here: the sampling of a request (`decode_service/request.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from common.errors import ConfigError
from common.excerpt import excerpt
from common.model.library import blamed

GENERATION_CONFIG = "generation_config.json"

_INCIDENTAL = frozenset(
    {
        "_from_model_config", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id",
        "use_cache", "cache_implementation", "output_attentions", "output_hidden_states", "output_scores",
        "return_dict_in_generate",
    }
)  # fmt: skip
"""Keys that change no token of an answer, or are obeyed."""

_NEUTRAL = {
    "do_sample": False, "temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "min_p": 0.0, "num_beams": 1,
    "repetition_penalty": 1.0, "length_penalty": 1.0, "num_return_sequences": 1,
}  # fmt: skip
"""Values with which a key does nothing."""


@dataclass(frozen=True, slots=True)
class EndTokens:
    """Where the end tokens of a model are written, each as its file has it."""

    generation: object
    """Of generation_config.json; None when there is no such file or it says none."""

    config: object
    """Of config.json."""

    tokenizer: int | None


def end_ids(spec: str, told: EndTokens, num_rows: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the tokens that end a sequence, ascending, and what people should know about them.

    Raises: `ConfigError` when a file has something else than token ids there.
    """
    generation = _ids(spec, GENERATION_CONFIG, told.generation)
    config = _ids(spec, "config.json", told.config)
    tokenizer = set() if told.tokenizer is None else {told.tokenizer}
    wanted = (generation or config) | tokenizer
    obeyed = {one for one in wanted if 0 <= one < num_rows}
    return tuple(sorted(obeyed)), tuple(_notes(obeyed, wanted - obeyed, config - wanted, num_rows))


def check_generation(spec: str, folder: Path) -> None:
    """Raise `ConfigError` when the library cannot take the generation config: it would blame the weights."""
    path = folder / GENERATION_CONFIG
    if path.exists():
        with blamed(spec, path):
            GenerationConfig.from_pretrained(folder, local_files_only=True)


def unused_defaults(declared: dict[str, Any]) -> tuple[str, ...]:
    """Return a note that names the defaults which no request gets; none when all of them do nothing."""
    unused = {
        key: value
        for key, value in declared.items()
        if key not in _INCIDENTAL and value is not None and (key not in _NEUTRAL or value != _NEUTRAL[key])
    }
    if not unused:
        return ()
    values = excerpt(", ".join(f"{key}={unused[key]!r}" for key in sorted(unused)))
    return (f"{GENERATION_CONFIG} has defaults that no request gets unless it says so itself: {values}",)


def _ids(spec: str, file: str, value: object) -> set[int]:
    """Return the ids of a field that is an id, a list of ids or null."""
    said = [one for one in (value if isinstance(value, list | tuple) else [value]) if one is not None]
    ids = [one for one in said if isinstance(one, int) and not isinstance(one, bool)]
    if len(ids) < len(said):
        problem = f"{file}: eos_token_id is {excerpt(repr(value))}, must be a token id or a list of them"
        raise ConfigError("model", spec, problem)
    return set(ids)


def _notes(obeyed: set[int], beyond: set[int], overruled: set[int], num_rows: int) -> Iterator[str]:
    if beyond:
        yield f"end tokens {sorted(beyond)} can never be sampled: the model has {num_rows} rows"
    if overruled:
        says = f"config.json says that {sorted(overruled)} end a sequence, {GENERATION_CONFIG} does not"
        yield f"{says}: they do not"
    if not obeyed:
        yield "no token ends a sequence: only limits and stop strings do"
