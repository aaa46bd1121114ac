"""Tests of `common/model/generation.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model.generation import EndTokens, check_generation, end_ids, unused_defaults

NUM_ROWS = 10

ENDS: dict[str, tuple[EndTokens, tuple[int, ...], list[str]]] = {
    "one token everywhere": (EndTokens(3, 3, 3), (3,), []),
    "a list and the tokenizer's": (EndTokens([7, 4], 4, 2), (2, 4, 7), []),
    "the config's where generation says none": (EndTokens(None, [5], None), (5,), []),
    "an empty list says none": (EndTokens([], 5, None), (5,), []),
    "null in a list": (EndTokens([6, None], None, None), (6,), []),
    "only the config disagrees": (
        EndTokens(3, [4, 3], None),
        (3,),
        ["config.json says that [4] end a sequence, generation_config.json does not: they do not"],
    ),
    "beyond the rows": (
        EndTokens([3, 10, -1], None, 12),
        (3,),
        ["end tokens [-1, 10, 12] can never be sampled: the model has 10 rows"],
    ),
    "none at all": (
        EndTokens(None, None, None),
        (),
        ["no token ends a sequence: only limits and stop strings do"],
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_end_tokens_of_all_files_are_obeyed_or_named(case: str) -> None:
    """The rule is the name of the case."""
    told, ids, notes = ENDS[case]

    assert end_ids("/m", told, NUM_ROWS) == (ids, tuple(notes))


@pytest.mark.parametrize("value", ["2", True, 1.5, [2, "x"], {"a": 1}])
def test_end_token_that_is_no_token_id_is_refused_with_its_file(value: object) -> None:
    """A sequence that never ends is worse than a service that does not start."""
    with pytest.raises(ConfigError) as refusal:
        end_ids("/m", EndTokens(value, 3, 3), NUM_ROWS)

    assert refusal.value.problem == (
        f"generation_config.json: eos_token_id is {value!r}, must be a token id or a list of them"
    )


def test_defaults_that_no_request_gets_are_named_in_one_line() -> None:
    """Row Y3: sampling that the author wrote down is neither obeyed nor dropped silently."""
    declared = {
        "top_p": 0.95,
        "do_sample": True,
        "repetition_penalty": 1.3,
        "eos_token_id": 4,
        "temperature": 1.0,
    }

    (note,) = unused_defaults(declared)

    assert note.endswith("unless it says so itself: do_sample=True, repetition_penalty=1.3, top_p=0.95")


def test_defaults_that_do_nothing_are_not_named() -> None:
    """Every saved model has some."""
    declared = {
        "transformers_version": "5",
        "use_cache": True,
        "do_sample": False,
        "temperature": 1.0,
        "top_k": None,
    }

    assert unused_defaults(declared) == ()


@pytest.mark.parametrize("content", ['{"pad_token_id": [1]}', '{"watermarking_config": 5}'])
def test_generation_config_that_cannot_be_taken_is_blamed_itself(tmp_path: Path, content: str) -> None:
    """The library finds out while it loads weights, whose file would be named for it."""
    check_generation("/m", tmp_path)
    (tmp_path / "generation_config.json").write_text(content)

    with pytest.raises(ConfigError, match=r"cannot load .*/generation_config\.json: "):
        check_generation("/m", tmp_path)
