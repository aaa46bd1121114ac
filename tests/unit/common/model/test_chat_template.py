"""Tests of `common/model/chat_template.py`."""

from __future__ import annotations

import pytest

from common.model.chat_template import MAX_BITS, MAX_LENGTH, ChatTemplate
from common.model.tiny import make_byte_tokenizer

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<b>"}]

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m['content'] }}\n{% endfor %}",
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    "turn of the model": "{% if add_generation_prompt %}assistant: {% endif %}",
    "json": "{{ messages | tojson }}",
    "loop controls": "{% for m in messages %}{% if m.role != 'user' %}{% break %}{% endif %}x{% endfor %}",
    "generation": "{% generation %}x{% endgeneration %}",
    "namespace": "{% set n = namespace(x=1) %}{% for m in messages %}{% set n.x = 3 %}{% endfor %}{{ n.x }}",
    "trimmed blocks": "{% if true %}\n  a\n{% endif %}\n b",
    "products": "{{ '=' * 20 }}{{ [1, 2] * 2 }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ 2 * 'ab' }}",
    "no tools": "{{ tools is none }}{{ tools is defined }}{{ documents is none }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_reads_as_transformers_renders_it(name: str) -> None:
    """The sandbox is that of transformers, but for what is bounded."""
    pretrained = make_byte_tokenizer()
    expected = pretrained.apply_chat_template(
        CHAT, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=False
    )

    assert ChatTemplate(TEMPLATES[name], pretrained.special_tokens_map).render(CHAT) == expected


@pytest.mark.parametrize(
    "product",
    [
        "10 ** (10 ** 9)",
        f"2 ** {MAX_BITS}",
        f"'ab' * {MAX_LENGTH // 2 + 1}",
        f"{MAX_LENGTH + 1} * [1]",
        f"2 ** {MAX_BITS // 2 - 1} * 2 ** {MAX_BITS // 2 - 1} * 2 ** 9",
    ],
)
def test_a_product_that_is_very_large_is_refused(product: str) -> None:
    """It would hold up the whole process, whatever thread it is made on."""
    with pytest.raises(OverflowError, match="too large"):
        ChatTemplate("{{ " + product + " }}", {}).render(CHAT)
