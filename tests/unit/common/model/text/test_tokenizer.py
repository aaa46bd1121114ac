"""Tests of common/model/text/tokenizer.py."""

import os
import sys
import threading
from collections.abc import Iterator

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.errors import ConfigError, InvalidRequest, PromptTooLong
from common.model.folder.cache import cache_folder, demo_checkpoint
from common.model.text import tokenizer as tokenizer_module
from common.model.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from common.model.tiny import BOS_ID, EOS_ID, make_byte_tokenizer
from tests.support.vocabularies import make_fallback_tokenizer

BYTES = Tokenizer(make_byte_tokenizer())


FALLBACK = Tokenizer(make_fallback_tokenizer())


def test_text_and_chat_get_the_model_s_special_tokens() -> None:
    """A text starts as the model wants it, a chat as the template says, and neither twice."""
    assert BYTES.encode("hi") == [BOS_ID, *b"hi"]
    assert BYTES.encode_chat([{"role": "user", "content": "hi"}]) == [BOS_ID, *b"user: hi\nassistant: "]


def test_text_that_begins_with_the_model_s_first_token_gets_it_once() -> None:
    """Row Y17: who copies a whole prompt means no second one; who writes two means two."""
    assert BYTES.encode("<bos>hi") == [BOS_ID, *b"hi"]
    assert BYTES.encode("<bos>") == BYTES.encode("") == [BOS_ID]
    assert BYTES.encode("<bos><bos>hi") == [BOS_ID, BOS_ID, *b"hi"]
    assert BYTES.encode("a<bos>") == [BOS_ID, *b"a", BOS_ID]


def test_control_tokens_of_a_text_are_such_unless_it_is_literal() -> None:
    """A text is a whole prompt, so its author may steer; texts of somebody else are taken literally."""
    assert BYTES.encode("a<eos>b") == [BOS_ID, *b"a", EOS_ID, *b"b"]
    assert BYTES.encode("<bos>a<eos>b", is_literal=True) == [BOS_ID, *b"<bos>a<eos>b"]
    assert BYTES.encode("a", is_literal=True) == [BOS_ID, *b"a"]


def test_literal_text_keeps_what_the_tokenizer_puts_after_a_text() -> None:
    """As every text of that model."""
    pretrained = make_byte_tokenizer()
    pretrained.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", pair=None, special_tokens=[("<bos>", BOS_ID), ("<eos>", EOS_ID)]
    )

    assert Tokenizer(pretrained).encode("<eos>", is_literal=True) == [BOS_ID, *b"<eos>", EOS_ID]


def test_control_token_that_the_vocabulary_has_too_is_ordinary_text_by_its_characters() -> None:
    """Taken without the added tokens it is the same one, and would steer; one of a single character does."""
    backend = Backend(models.BPE(vocab={"<": 0, ">": 1, "<>": 2, "^": 3}, merges=[("<", ">")]))
    backend.add_special_tokens([AddedToken("<>", special=True), AddedToken("^", special=True)])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))

    assert tokenizer.encode("><>", is_literal=True) == [1, 0, 1]
    with pytest.raises(InvalidRequest, match=r"'\^', which this model cannot read as ordinary text"):
        tokenizer.encode("^", is_literal=True)


def test_token_for_unknown_characters_is_no_control_token() -> None:
    """It is special, and any text may have it."""
    backend = Backend(models.WordLevel({"<unk>": 0, "hi": 1, "<eos>": 2, "a": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<unk>", "<eos>"])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))

    assert tokenizer.encode("hi <unk> b <eos>") == [1, 0, 0, 2]
    assert tokenizer.encode("hi <unk> b <eos>", is_literal=True) == [1, 0, 0, 0, 0, 0]


def test_tokenizer_that_reads_special_tokens_as_text_does_so_everywhere() -> None:
    """Its folder says split_special_tokens; then there is nothing to hide."""
    pretrained = make_byte_tokenizer()
    pretrained.backend_tokenizer.encode_special_tokens = True
    chat = [{"role": "user", "content": "<eos>"}]

    assert Tokenizer(pretrained).encode("<eos>") == [BOS_ID, *b"<eos>"]
    assert Tokenizer(pretrained).encode_chat(chat) == [*b"<bos>user: <eos>\nassistant: "]


TEXTS = {
    "words": "the cat s " * 1000,
    "spaces": " " * 6000,
    "runs of bytes": "漢é😀" * 2000,
    "special tokens": "<eos>cat<bos>" * 500,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["bytes", "fallback"])
def test_a_long_text_has_the_tokens_of_a_short_one(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, name: str
) -> None:
    """Only how the backend is asked depends on the length."""
    assert len(TEXTS[name]) > LONG_TEXT_CHARS
    as_batch = tokenizer.encode(TEXTS[name])

    monkeypatch.setattr(tokenizer_module, "LONG_TEXT_CHARS", len(TEXTS[name]))

    assert tokenizer.encode(TEXTS[name]) == as_batch


def test_a_long_chat_has_the_tokens_of_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template's special tokens, and no others."""
    chat = [{"role": "user", "content": "é" * 5000}, {"role": "assistant", "content": "hi"}]
    as_batch = BYTES.encode_chat(chat)

    monkeypatch.setattr(tokenizer_module, "LONG_TEXT_CHARS", 10_000)

    assert BYTES.encode_chat(chat) == as_batch
    assert as_batch.count(BOS_ID) == 1


@pytest.fixture
def _quick_turns() -> Iterator[None]:
    """Let a thread that wants the GIL have it at once."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("_quick_turns")
def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    """Whoever keeps the GIL for a second stops the event loop from another thread too.

    A backend that kept it would leave this thread the moment between its start and its call.
    """
    started, ended = threading.Event(), threading.Event()

    def encode() -> None:
        started.set()
        BYTES.encode("a" * 1_000_000)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    started.wait()
    turns = 0
    while not ended.is_set():
        turns += 1
    thread.join()

    assert turns > 50_000


def test_settings_that_cut_or_fill_texts_are_not_those_of_the_model() -> None:
    """A folder keeps what its trainer called last; transformers ignores it too (Y1)."""
    backend = make_byte_tokenizer().backend_tokenizer
    backend.enable_truncation(4)
    backend.enable_padding(length=20)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))

    assert tokenizer.encode("abcdefg") == BYTES.encode("abcdefg")
    assert tokenizer.encode("a") == BYTES.encode("a")


@pytest.mark.parametrize("max_tokens", [1, 20, 100])
def test_a_text_that_cannot_fit_is_refused_with_the_numbers(max_tokens: int) -> None:
    """Five characters are the longest token, so that much fits whatever it says."""
    assert BYTES.encode("<eos>" * max_tokens, max_tokens=max_tokens) == [BOS_ID, *[EOS_ID] * max_tokens]

    with pytest.raises(PromptTooLong) as refusal:
        BYTES.encode("x" * (5 * max_tokens + 1), max_tokens=max_tokens)

    assert (refusal.value.limit_name, refusal.value.needed, refusal.value.limit) == (
        "prompt bytes",
        5 * max_tokens + 1,
        5 * max_tokens,
    )


def test_a_chat_whose_contents_cannot_fit_is_refused_before_it_is_rendered() -> None:
    """All messages count together; this template would refuse the third."""
    chat = [{"role": "user", "content": "x" * 30}, {"role": "user", "content": "y" * 21}, {"role": "user"}]

    with pytest.raises(PromptTooLong) as refusal:
        BYTES.encode_chat(chat, max_tokens=10)

    assert (refusal.value.needed, refusal.value.limit) == (51, 50)


def test_a_chat_that_cannot_fit_once_rendered_is_refused() -> None:
    """What the template adds counts too."""
    with pytest.raises(PromptTooLong) as refusal:
        BYTES.encode_chat([{"role": "user", "content": "x" * 49}], max_tokens=10)

    assert refusal.value.needed == len("<bos>user: " + "x" * 49 + "\nassistant: ")


def test_nothing_is_refused_where_no_bound_is_known() -> None:
    """Here a run of unknown characters is one token."""
    backend = Backend(models.BPE(vocab={"<unk>": 0}, merges=[], unk_token="<unk>", fuse_unk=True))
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))

    assert tokenizer.encode("x" * 10_000, max_tokens=1) == [0]


def test_chat_without_template_is_the_client_s_error() -> None:
    """A model that has no chat template refuses messages by the field `chat`."""
    with pytest.raises(InvalidRequest) as refusal:
        FALLBACK.encode_chat([{"role": "user", "content": "hi"}])

    assert [violation.field for violation in refusal.value.violations] == ["chat"]


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
ENDLESS += "{% endfor %}{% endfor %}"


def with_template(template: str) -> Tokenizer:
    """Return a tokenizer with a chat template of its own."""
    pretrained = make_byte_tokenizer()
    pretrained.chat_template, pretrained.name_or_path = template, "/models/odd"
    return Tokenizer(pretrained)


@pytest.mark.parametrize(
    ("words", "told"),
    [("'roles must alternate'", "roles must alternate"), ("'no ' + messages[0].content", "TemplateError")],
)
def test_a_template_that_refuses_is_quoted_in_its_own_words_only(words: str, told: str) -> None:
    """Others may be a message of the chat, which no log may have."""
    tokenizer = with_template("{{ raise_exception(" + words + ") }}")

    with pytest.raises(InvalidRequest) as refusal:
        tokenizer.encode_chat([{"role": "user", "content": "a secret"}])

    (violation,) = refusal.value.violations
    assert violation.problem == f"the chat template refused: {told}"
    assert refusal.value.__cause__ is None


def test_a_template_that_does_not_end_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first chat would find it, and each chat after that."""
    monkeypatch.setattr(tokenizer_module, "TEMPLATE_LIMIT_S", 0.2)

    with pytest.raises(ConfigError, match=r"chat_template=/models/odd: .* not ended within 0\.2 s"):
        with_template(ENDLESS)


@pytest.mark.parametrize("template", ["{% for %}", "hi {{ messages", "{{ messages | no_such_filter }}"])
def test_what_is_no_template_is_refused_at_start(template: str) -> None:
    """Every chat would be."""
    with pytest.raises(ConfigError, match=r"chat_template=/models/odd: is no template, at line 1: "):
        with_template(template)


def test_template_that_leaves_out_what_is_said_is_refused_at_start() -> None:
    """It takes contents as lists; every user would get the answer to no question, with status OK."""
    template = "{% for one in messages[0].content if one.type == 'text' %}{{ one.text }}{% endfor %}"

    with pytest.raises(
        ConfigError, match="chat_template=/models/odd: leaves out what the user of a chat says"
    ):
        with_template(template)


def test_a_chat_at_which_the_template_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the model's author has limited time, and no thread of it is left."""
    monkeypatch.setattr(tokenizer_module, "TEMPLATE_LIMIT_S", 0.2)
    tokenizer = with_template(
        "{% if messages | length > 3 %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    )

    with pytest.raises(InvalidRequest, match=r"chat: the chat template has not ended within 0\.2 s"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}] * 4)

    assert "limited" not in {thread.name for thread in threading.enumerate()}


def test_of_several_templates_the_default_one_is_used() -> None:
    """Without one the model has none for chats that name no template."""
    pretrained = make_byte_tokenizer()
    pretrained.chat_template = {"default": "x{{ messages[0].content }}", "tool_use": "y"}
    assert Tokenizer(pretrained).encode_chat([{"role": "user", "content": "hi"}]) == [*b"xhi"]

    pretrained.chat_template = {"tool_use": "y"}
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(pretrained).encode_chat([{"role": "user", "content": "hi"}])


def test_a_template_that_refuses_the_trial_may_take_other_chats() -> None:
    """Some demand a system message, which says nothing about the others."""
    tokenizer = with_template("{% if messages | length < 2 %}{{ raise_exception('no') }}{% endif %}x")

    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}] * 2) == [*b"x"]


def test_chat_the_template_refuses_is_the_client_s_error() -> None:
    """What a template raises becomes a violation of the field `chat`."""
    with pytest.raises(InvalidRequest) as refusal:
        BYTES.encode_chat([{"role": "user"}])

    assert [violation.field for violation in refusal.value.violations] == ["chat"]


def test_tokenizer_without_backend_is_refused() -> None:
    """A tokenizer that cannot be streamed is a configuration error."""
    with pytest.raises(ConfigError, match="tokenizer"):
        Tokenizer(object())


def test_the_vocabulary_is_that_of_the_tokenizer() -> None:
    """Specials count."""
    assert BYTES.vocab_size == 259


@pytest.mark.demo
def test_a_long_text_has_the_tokens_of_a_short_one_in_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a vocabulary of words, and where some characters have no token."""
    folder = demo_checkpoint(cache_folder(os.environ))
    if folder is None:
        pytest.skip("the demo model is not in the cache")
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    text = "the quick brown fox, wörld 😀 漢字 1234\n\n \x04<|im_start|> don't " * 100
    as_batch = tokenizer.encode(text)

    monkeypatch.setattr(tokenizer_module, "LONG_TEXT_CHARS", len(text))

    assert tokenizer.encode(text) == as_batch
