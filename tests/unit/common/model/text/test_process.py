"""Tests of `common/model/text/process.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.errors import ConfigError, InvalidRequest, PromptTooLong
from common.model.text.process import TextProcess
from common.model.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from common.model.text.vocabulary import Vocabulary
from common.model.tiny import BOS_ID, make_byte_tokenizer

pytestmark = pytest.mark.usefixtures("leak_check")

LIMIT_S, ROOM_BYTES = 1.0, 128 << 20

CHAT = [{"role": "user", "content": "hi<eos>"}]
HOSTILE_CHAT = [{"role": "user", "content": "hi"}] * 4

GROWS = "{% set n = namespace(s='x' * 9, l=[1]) %}{% for i in range(99) %}BODY{% endfor %}"
NESTED = "{% for one in range(99999) %}" * 4 + "BODY" + "{% endfor %}" * 4

TEMPLATES = {
    "spins": NESTED,
    "joins": GROWS.replace("BODY", "{% set n.s = n.s ~ n.s %}"),
    "adds": GROWS.replace("BODY", "{% set n.s = n.s + n.s %}"),
    "adds lists": GROWS.replace("BODY", "{% set n.l = n.l + n.l %}"),
    "replaces": GROWS.replace("BODY", "{% set n.s = n.s | replace('x', 'xxxxxxxxx') %}"),
    "joins a list": GROWS.replace("BODY", "{% set n.s = [n.s, n.s] | join(n.s) %}"),
    "writes without end": NESTED.replace("BODY", "{{ messages[0].content }}"),
    "centers": "{{ 'x' | center(10 ** 10) }}",
    "indents": "{{ ('x\n' * 9999) | indent(10 ** 6) }}",
    "formats": "{{ '%9999999999d' | format(1) }}",
    "fills by a method": "{{ 'x'.ljust(10 ** 10) }}",
    "formats by a method": "{{ '{:>9999999999}'.format(1) }}",
    "writes numbers with a width": "{{ '%9999999999d' % 1 }}",
    "writes JSON": "{{ range(99999) | list | tojson(indent=10 ** 5) }}",
    "takes a power": "{{ (7 ** 9999) | int | string | length }}" + NESTED,
    "calls itself": "{% macro f(s) %}{{ f(s ~ s) }}{{ f(s) }}{% endmacro %}{{ f('x') }}",
}


def with_template(body: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose template does something with long chats, and passes the trials."""
    pretrained = make_byte_tokenizer()
    pretrained.name_or_path = "/models/odd"
    pretrained.chat_template = (
        f"{{% if messages | length > 3 %}}{body}{{% endif %}}{{{{ messages[0].content }}}}"
    )
    return pretrained


def started(pretrained: PreTrainedTokenizerFast) -> TextProcess:
    """Return the processes of a tokenizer, with small limits."""
    return TextProcess(Vocabulary(pretrained), limit_s=LIMIT_S, room_bytes=ROOM_BYTES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_is_ended_and_the_next_chat_is_read(name: str) -> None:
    """In time and in memory, whatever steps it takes; only its own chat is refused, by name."""
    with started(with_template(TEMPLATES[name])) as text:
        with pytest.raises(InvalidRequest) as refusal:
            text.encode_chat(HOSTILE_CHAT)

        assert [one.field for one in refusal.value.violations] == ["chat"]
        assert text.encode_chat(CHAT) == [*b"hi<eos>"]


SLOW = Regex("x+x+(?!x|$)")
"""Takes the cube of the length of a text."""

NESTED_PATTERN = Regex("(x+x+)+[yz]")
"""Takes so long that the library gives up, by a panic."""


def with_rules(
    normalizer: normalizers.Normalizer | None = None, splitter: pre_tokenizers.PreTokenizer | None = None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with rules of its own."""
    pretrained = make_byte_tokenizer()
    backend = pretrained.backend_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    if splitter is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence([splitter, backend.pre_tokenizer])
    return pretrained


@pytest.mark.parametrize("length", [LONG_TEXT_CHARS, LONG_TEXT_CHARS + 1])
@pytest.mark.parametrize(
    ("pretrained", "refusal"),
    [
        (with_rules(splitter=pre_tokenizers.Split(SLOW, "isolated")), "not ended within 1 s"),
        (with_rules(normalizer=normalizers.Replace(SLOW, "a")), "not ended within 1 s"),
        (with_rules(normalizer=normalizers.Replace(Regex("x"), "y" * 1000)), "128 MiB of memory"),
        (with_rules(splitter=pre_tokenizers.Split(NESTED_PATTERN, "isolated")), "PanicException while"),
    ],
    ids=["splits slowly", "replaces slowly", "grows", "panics"],
)
def test_a_hostile_tokenizer_is_ended_and_the_next_text_is_read(
    pretrained: PreTrainedTokenizerFast, refusal: str, length: int
) -> None:
    """Short texts and long ones alike: neither is tokenized where the service is."""
    with started(pretrained) as text:
        with pytest.raises((InvalidRequest, RuntimeError), match=refusal):
            text.encode("x" * length)

        assert text.encode("hi") == [BOS_ID, *b"hi"]


def test_a_tokenizer_that_grows_without_bound_is_refused_at_start() -> None:
    """Every text would be."""
    text = started(with_rules(normalizer=normalizers.Sequence([normalizers.Replace(Regex("x"), "xx")] * 30)))

    with pytest.raises(ConfigError, match="128 MiB of memory"):
        text.start()
    text.close()


@pytest.fixture(name="text", scope="module")
def make_text() -> Iterator[TextProcess]:
    """Yield the processes of an ordinary tokenizer."""
    with TextProcess(Vocabulary(make_byte_tokenizer())) as text:
        yield text


@pytest.mark.parametrize("prompt", ["hi<eos>", "é😀\x00", "x" * (LONG_TEXT_CHARS + 1) + "<eos>"])
@pytest.mark.parametrize("is_literal", [True, False])
def test_a_text_has_the_ids_of_its_tokenizer(text: TextProcess, prompt: str, is_literal: bool) -> None:
    """Wherever it is read."""
    tokenizer = Tokenizer(make_byte_tokenizer())

    assert text.encode(prompt, is_literal=is_literal) == tokenizer.encode(prompt, is_literal=is_literal)


def test_what_a_tokenizer_refuses_is_refused_alike(text: TextProcess) -> None:
    """With the numbers, or with the field and the words of the template."""
    with pytest.raises(PromptTooLong) as refusal:
        text.encode("x" * (LONG_TEXT_CHARS + 1), max_tokens=10)
    assert (refusal.value.needed, refusal.value.limit) == (LONG_TEXT_CHARS + 1, 50)

    with pytest.raises(InvalidRequest, match="chat: the role of message 1 reads like"):
        text.encode_chat([{"role": "x<eos>", "content": "hi"}])


@pytest.mark.parametrize("template", [TEMPLATES["joins"], "{% for %}", "nothing of it"])
def test_a_template_that_cannot_be_used_is_refused_at_start(template: str) -> None:
    """Every chat would be."""
    pretrained = make_byte_tokenizer()
    pretrained.name_or_path, pretrained.chat_template = "/models/odd", template

    text = started(pretrained)
    with pytest.raises(ConfigError, match="/models/odd"):
        text.start()
    text.close()
