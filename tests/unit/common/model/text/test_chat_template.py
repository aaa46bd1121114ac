"""Tests of `common/model/text/chat_template.py`."""

from __future__ import annotations

import pytest

from common.model.text.chat_template import MAX_BITS, MAX_LENGTH, CannotContinue, ChatTemplate
from common.model.tiny import make_byte_tokenizer

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<b>"},
    {"role": "user", "content": " é "},
]

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


OPEN_TEMPLATES = {
    "as it is": "{% for m in messages %}[{{ m.role }}]{{ m.content }}|{% endfor %}",
    "trimmed": "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}|{% endfor %}",
    "closed at the end": "{% for m in messages %}{{ m.content }}{% endfor %} {{ eos_token }}",
    "with a beginning for the next": "{{ messages[-1].content }}{{ 'assistant: ' if add_generation_prompt }}",
}


@pytest.mark.parametrize("content", ["and then", "  and ", "", "and CONTINUE", "\U0010fff0 a"])
@pytest.mark.parametrize("name", OPEN_TEMPLATES)
def test_last_turn_of_the_assistant_stays_open(name: str, content: str) -> None:
    """As transformers leaves it, white space at its end included."""
    pretrained, chat = make_byte_tokenizer(), [*CHAT, {"role": "assistant", "content": content}]
    expected = pretrained.apply_chat_template(
        chat, chat_template=OPEN_TEMPLATES[name], continue_final_message=True, tokenize=False
    )

    assert ChatTemplate(OPEN_TEMPLATES[name], pretrained.special_tokens_map).render(chat) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{{ messages[-1].content | replace('n', 'm') }}",
        "{{ messages[-1].content[:2] }}",
    ],
)
def test_turn_that_a_template_does_not_show_cannot_be_continued(template: str) -> None:
    """The model would go on with something else."""
    with pytest.raises(CannotContinue):
        ChatTemplate(template, {}).render([*CHAT, {"role": "assistant", "content": "and then"}])


def test_chat_can_be_rendered_with_every_turn_closed() -> None:
    """Which shows what stands around turns alone."""
    template = ChatTemplate("{{ messages | length }}{% if add_generation_prompt %}assistant: {% endif %}", {})

    assert (template.render_closed(CHAT), template.render(CHAT)) == ("3", "3assistant: ")
