"""transformers' own `generate`, unchanged: what our tokens and our speed are compared with.

Theory of operation: greedy, with its KV cache, over one static batch of prompts of equal length, so that
nothing is padded. Ends of sequences are ignored, and so are the defaults of the folder's generation config:
no request of ours gets them.

Ownership: one per process; a model in it has not been given our attention (`attention.install`) nor our
linears (`stabilise`), and sets the number of threads of the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from common.model.loader import LoadedModel


class Reference:
    """A model that generates as its library has it."""

    def __init__(self, loaded: LoadedModel, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model: Any = loaded.model
        # The pad is never used: no row ends before the others.
        self._model.generation_config = GenerationConfig(pad_token_id=0)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        on_tokens: Callable[[], None] = lambda: None,
    ) -> tuple[tuple[int, ...], ...]:
        """Return `num_tokens` tokens for each of the prompts, which have the same length.

        `on_tokens` is called after each step, the one over the prompts included.
        """
        if len({len(prompt) for prompt in prompts}) != 1:
            raise ValueError("the prompts of a static batch have one length")
        ids_BT = torch.tensor([list(prompt) for prompt in prompts])
        output_BT = self._model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            do_sample=False,
            use_cache=True,
            max_new_tokens=num_tokens,
            streamer=_StepListener(on_tokens),
        )
        return tuple(tuple(row) for row in output_BT[:, ids_BT.shape[1] :].tolist())


class _StepListener:
    """A transformers streamer that passes on when tokens come, and not which."""

    def __init__(self, on_tokens: Callable[[], None]) -> None:
        self._on_tokens = on_tokens
        self._has_seen_prompt = False

    def put(self, token_ids: Tensor) -> None:
        """Take the prompt first, then the tokens of each step."""
        if self._has_seen_prompt:
            self._on_tokens()
        self._has_seen_prompt = True

    def end(self) -> None:
        """Take the end."""
