"""Tokenizers and chat templates as models of several families have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from common.model.folder.source import TinyFamily
from common.model.tiny import make_byte_tokenizer, tiny_config


def make_spaced_tokenizer(**config: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer as SentencePiece makes them: words with their space, unknown characters as bytes."""
    words = ["<unk>", "<s>", "</s>", "▁", "h", "i", "▁h", "▁hi", "1", "2"]
    vocab = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(249))])}
    merges = [("▁", "h"), ("▁h", "i")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:3]])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **config
    )


def make_word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer as BERT's: words without spaces, small letters, one token for what is unknown."""
    words = ["[UNK]", "[CLS]", "[SEP]", "hi", "##1", "no", ".", "1", "##2", "<", "e", "##os", ">", "end", "a"]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, special)
    backend.add_special_tokens(words[:3])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", bos_token="[CLS]", eos_token="[SEP]"
    )


def make_scored_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words with scores, which are found with the space before them."""
    scores = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("▁", -2.0),
        ("h", -3.0),
        ("i", -3.0),
        ("▁hi", -1.0),
        ("<", -5.0),
    ]
    backend = Backend(models.Unigram([*scores, (">", -5.0), ("s", -5.0), ("/", -6.0), ("a", -6.0)], unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "</s>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="</s>", eos_token="</s>", unk_token="<unk>"
    )


def make_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama's first: a first word loses its space, unknown characters are bytes."""
    words = ["<eos>", "▁", "▁the", "▁cat", "s", "é"]
    vocab = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def make_suffix_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer as CLIP's: the end of a word is written, and read as a space before the next."""
    words = ["<end>", "a", "b</w>", "c</w>"]
    backend = Backend(models.BPE({word: index for index, word in enumerate(words)}, []))
    backend.decoder = decoders.BPEDecoder()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


CONTROL = (
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>",
    "<|assistant|>", "[INST]", "[/INST]",
)  # fmt: skip
"""Special tokens that the templates write."""

TEMPLATES = {
    "ChatML": (
        "{% for m in messages %}{{'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "Llama 2": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content.strip() + ' [/INST]' }}{% else %}"
        "{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "Llama 3": (
        "{% for m in messages %}{% set c = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + "
        "m.content | trim + '<|eot_id|>' %}{% if loop.first %}{% set c = bos_token + c %}{% endif %}{{ c }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "Phi": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "thoughts": (
        "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' and '</think>' in c %}"
        "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
    "nothing but contents": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "angles": "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}",
}


def with_control_tokens(pretrained: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    """Give a tokenizer a template and the tokens that it writes; <think> is one that is not special."""
    special = [AddedToken(text, special=True, normalized=False) for text in CONTROL]
    pretrained.add_tokens(special, special_tokens=True)
    pretrained.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    pretrained.chat_template = template
    return pretrained


VOCABULARIES = {
    "bytes": make_byte_tokenizer,
    "spaces": make_spaced_tokenizer,
    "words": make_word_tokenizer,
    "scores": make_scored_tokenizer,
}
"""How to make a tokenizer of each kind."""


def save_tokenizer(folder: Path, family: str, tokenizer: PreTrainedTokenizerFast, **config: object) -> Path:
    """Write what a tokenizer is read from, with these keys in tokenizer_config.json; None takes one away."""
    tiny_config(TinyFamily(family)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", **config)
    return folder


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; None takes one away."""
    content = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
