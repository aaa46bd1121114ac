"""The fixtures of the acceptance cases: small models by name, their folders, prompts and the ORACLE.

    DENSE     4 layers of full attention
    HYB       6 layers, 0 to 4 see a window of 32 tokens (two pages), 5 sees all
    HYB_ODD   the same with a window of 24 tokens, which no page boundary divides
    SHARE     6 layers of which 2 reuse another layer's KV
    UNEVEN    HYB whose full layer has another head size, so that groups differ in their stride

ORACLE is transformers' own `generate`, greedy, in fp32, on a copy of the model that kvspan never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

from common.model.folder.source import TinyFamily
from common.model.tiny import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
    make_byte_tokenizer,
    make_tiny,
    tiny_config,
    tiny_gemma3_config,
)
from kvspan.client import Completion

SEED = 3
"""Of the weights; another one than `tiny:` models have."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}


def dense_config(**changes: object) -> PreTrainedConfig:
    """Return DENSE, with fields of the config changed."""
    config = tiny_config(TinyFamily.QWEN3)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def hybrid_config(window: int = 32) -> PreTrainedConfig:
    """Return HYB, or HYB_ODD with a window of 24."""
    return tiny_gemma3_config(window)


def share_config() -> PreTrainedConfig:
    """Return SHARE: layers 4 and 5 read what 2 and 3 stored."""
    return Gemma3nTextConfig(
        **_SIZES,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 3,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 6,
        altup_num_inputs=2,
    )


def uneven_config() -> PreTrainedConfig:
    """Return UNEVEN: heads of 16 in the windowed layers, of 24 in the full one."""
    return Gemma4TextConfig(
        **_SIZES,
        num_hidden_layers=6,
        global_head_dim=24,
        sliding_window=32,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=16,
    )


def linear_attention_config() -> PreTrainedConfig:
    """Return REC with layers 0, 1 and 2 of linear attention and layer 3 of full attention."""
    return Qwen3NextConfig(
        **_SIZES,
        num_hidden_layers=4,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


def state_space_config() -> PreTrainedConfig:
    """Return REC with three state-space layers."""
    return MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=3, state_size=8)


def save_model(config: PreTrainedConfig, folder: Path, *, seed: int = SEED) -> str:
    """Write a seeded model of this config and its tokenizer as a checkpoint; return the folder."""
    write_checkpoint(make_tiny(config, seed, torch.float32), folder)
    return str(folder)


def write_checkpoint(model: PreTrainedModel, folder: Path) -> None:
    """Write a model as a checkpoint with the byte tokenizer."""
    model.save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Return a prompt of random bytes; prompts of one seed are prefixes of one another."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, 256, (2048,), generator=generator)[:length].tolist()


class Oracle:
    """The stock model of a checkpoint."""

    def __init__(self, folder: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()

    def generate(self, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Return the greedy continuation, end-of-sequence tokens ignored."""
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=[],
                pad_token_id=PAD_ID,
            )
        return tuple(output[0, len(prompt) :].tolist())

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int] = ()) -> torch.Tensor:
        """Return the log-probabilities [1 + answer, vocabulary] of what follows the prompt and each token."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 :]
        return torch.log_softmax(logits.float(), dim=-1)

    def assert_greedy(self, prompt: Sequence[int], completion: Completion) -> None:
        """Check every token of a completion, which must carry log-probabilities, in one forward.

        Each token must be the most probable one after those before it, which is what greedy `generate`
        returns, and as probable as told: a misplaced key that leaves the choice alone still shows.
        Tolerance: fp32 sums in another order differ by about 1e-5 here.
        """
        tokens = completion.token_ids
        expected = self.logprobs(prompt, tokens[:-1])
        assert tuple(expected.argmax(-1).tolist()) == tokens, f"prompt of {len(prompt)} tokens"
        told = torch.tensor([position.chosen.logprob for position in completion.logprobs])
        chosen = expected.max(-1).values
        assert torch.allclose(told, chosen, rtol=0, atol=1e-3), f"prompt of {len(prompt)}: {told - chosen}"
