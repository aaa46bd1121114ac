"""Tiny models with seeded random weights and a byte-level tokenizer, for tests and for trying things out.

Theory of operation: weights are drawn in float32 from a generator of their own, parameter by parameter in
name order, and cast afterwards, so that a family and a seed give the same model in every process and the
global random state stays untouched. Matrices are scaled by their width, and one-dimensional
parameters are their usual start plus noise; greedy output then wanders over many tokens, which makes a
lost or misplaced key visible.

Token id b < 256 is the byte b; the special tokens follow.
"""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from common.model.folder.source import TinyFamily
from common.model.text.token_bytes import byte_symbols

BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
VOCAB_SIZE = 259
_GAIN = 2.0
"""Growth through a matrix; above one, so that attention is sharp and output depends on all of it."""
_SPECIALS = {"<bos>": BOS_ID, "<eos>": EOS_ID, "<pad>": PAD_ID}
_CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_TOKEN_IDS = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}


def tiny_config(family: TinyFamily) -> PreTrainedConfig:
    """Return the config of a tiny model; all sizes differ where the architecture lets them."""
    if family is TinyFamily.QWEN3:
        return Qwen3Config(
            **_TOKEN_IDS,
            hidden_size=80,
            intermediate_size=112,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )
    if family is TinyFamily.GEMMA3:
        return tiny_gemma3_config(window=32)
    return LlamaConfig(
        **_TOKEN_IDS,
        hidden_size=72,
        intermediate_size=104,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=12,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )


def tiny_gemma3_config(window: int) -> Gemma3TextConfig:
    """Return a config of six layers: 0 to 4 see `window` tokens, 5 sees all."""
    return Gemma3TextConfig(
        **_TOKEN_IDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=window,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        max_position_embeddings=6144,
        tie_word_embeddings=False,
    )


def make_tiny(config: PreTrainedConfig, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of this config with weights drawn from `seed`, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * _GAIN * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)
    model.requires_grad_(False)
    return model.to(dtype).eval()


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte; encoding starts with <bos>, and there is a chat template."""
    symbols = byte_symbols()
    backend = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(symbols)}, merges=[]))
    backend.add_special_tokens([AddedToken(text, special=True) for text in _SPECIALS])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
