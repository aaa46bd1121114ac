"""transformers' own generate is left as it is: greedy, past ends of sequences, over one static batch."""

from __future__ import annotations

import pytest
import torch

from common.model.loader import load_model
from common.model.reference import Reference


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Return a tiny model with the number of threads that the process has already."""
    return Reference(load_model("tiny:qwen3", "float32", progress=False), torch.get_num_threads())


def test_every_prompt_gets_the_tokens_asked_for(reference: Reference) -> None:
    """A batch gives each row what it gets alone, in fp32."""
    together = reference.generate([(7, 11, 13), (5, 3, 2)], 6)

    assert [len(row) for row in together] == [6, 6]
    assert together == (*reference.generate([(7, 11, 13)], 6), *reference.generate([(5, 3, 2)], 6))


def test_listener_hears_of_every_step(reference: Reference) -> None:
    """One call a token of each row, the first one included, the prompt not."""
    heard: list[int] = []

    reference.generate([(7, 11, 13), (5, 3, 2)], 4, lambda: heard.append(1))

    assert len(heard) == 4


def test_row_goes_on_after_its_end_of_sequence() -> None:
    """Ends are ignored, so that every row has as many tokens as the others."""
    loaded = load_model("tiny:qwen3", "float32", progress=False)
    threads = torch.get_num_threads()
    ((first,),) = Reference(loaded, threads).generate([(7, 11, 13)], 1)
    loaded.model.generation_config.eos_token_id = first

    assert len(Reference(loaded, threads).generate([(7, 11, 13)], 5)[0]) == 5


def test_defaults_of_the_folder_change_no_token(reference: Reference) -> None:
    """No request of ours gets them either; the penalty alone would make another answer."""
    loaded = load_model("tiny:qwen3", "float32", progress=False)
    loaded.model.generation_config.update(repetition_penalty=5.0, suppress_tokens=list(range(200)))

    answer = Reference(loaded, torch.get_num_threads()).generate([(7, 11, 13)], 6)

    assert answer == reference.generate([(7, 11, 13)], 6)


def test_prompts_of_two_lengths_are_refused(reference: Reference) -> None:
    """Padding would change both speed and bits."""
    with pytest.raises(ValueError, match="one length"):
        reference.generate([(7, 11, 13), (5, 3)], 2)
