"""Text to token ids and back, whole or token by token.

Theory of operation of `TextStream`: deltas are differences of decoded text over a short window of tokens.

    | emitted tokens ... | context | pending |
                           text of context is known to be final and was emitted

Only two things can still change when another token comes: a last U+FFFD, which is how decoders show a
character whose bytes are not all there, and a run of byte-fallback tokens, which is decoded as a whole. So
these are held back, everything else is emitted, and the pending tokens become the next context. The
concatenation of all deltas is `Tokenizer.decode` of all ids, even where the bytes are no valid text.

A chat template is a program of the model's author: its time is limited, and it is tried once at start.

A text that cannot fit is refused before it is tokenized. A long one is tokenized as a batch of one, during
which other threads may run Python: `encode` of the backend lets none of them do so before it ends.

Not here: stop strings (`stops.py`), what can fit (`text_bound.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.errors import ConfigError, InvalidRequest, PromptTooLong, Violation
from common.excerpt import excerpt
from common.model.chat_template import ChatTemplate
from common.model.text_bound import text_bound
from common.model.tokenizer_files import default_template
from common.runtime.limited import run_limited

LONG_TEXT_CHARS = 4000
"""A longer text takes milliseconds to tokenize: nothing for the event loop."""

TEMPLATE_LIMIT_S = 5.0
"""Seconds in which a chat template has to render a chat; good ones take milliseconds."""

TRIAL = ({"role": "user", "content": "Hello"},)
"""The chat that a template is tried with at start."""

_INCOMPLETE = "\ufffd"


class Tokenizer:
    """The tokenizer of a loaded model; holds no state between calls."""

    def __init__(self, pretrained: PreTrainedTokenizerBase) -> None:
        """Wrap a transformers tokenizer.

        Raises ConfigError when it has no `tokenizers` backend, without which text cannot be streamed, and
        when its chat template does not end.
        """
        if not isinstance(pretrained, PreTrainedTokenizerFast):
            raise ConfigError("model", type(pretrained).__name__, "the tokenizer has no tokenizer.json form")
        self._pretrained = pretrained
        self._backend = pretrained.backend_tokenizer
        names = (f"<0x{byte:02X}>" for byte in range(256))
        ids = (self._backend.token_to_id(name) for name in names)
        self._byte_ids = frozenset(token_id for token_id in ids if token_id is not None)
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # A tokenizer.json may say to cut or to fill a text: settings of whoever trained, not of the model.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._bound = text_bound(self._backend, lambda text: len(self._ids(text, add_special_tokens=False)))
        self._template = _template_of(pretrained)
        self._try_template()

    @property
    def vocab_size(self) -> int:
        """Ids this tokenizer can produce, added tokens included; logits may be longer."""
        return len(self._pretrained)

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a text, with the special tokens this model puts around one.

        Raises: `PromptTooLong` when the text cannot fit into `max_tokens`, before it is tokenized; one that
        can, but does not, is returned.
        """
        self._check_fits([text], max_tokens)
        return self._ids(text, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of a chat (`role` and `content` each) up to where the model's turn begins.

        Raises: InvalidRequest when the model has no chat template or its template refuses the messages;
        `PromptTooLong` as `encode` does. All contents count for it, also what the template would leave out.
        """
        if self._template is None:
            raise InvalidRequest(
                [Violation("chat", "this model has no chat template; send text or token ids")]
            )
        self._check_fits([message.get("content", "") for message in messages], max_tokens)
        try:
            text = run_limited(partial(self._template.render, messages), TEMPLATE_LIMIT_S)
        except TimeoutError as error:
            raise InvalidRequest([Violation("chat", f"the chat template has {error}")]) from None
        except Exception as refusal:  # a template is a program of the model's author and may raise anything
            # Its words may quote a whole message.
            problem = f"the chat template refused: {excerpt(str(refusal))}"
            raise InvalidRequest([Violation("chat", problem)]) from refusal
        self._check_fits([text], max_tokens)
        return self._ids(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of some ids without special tokens; ids without a token count for nothing."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def ends_in_byte_run(self, token_ids: Sequence[int]) -> bool:
        """Tell whether the last token that is text is a single byte, decoded only with its neighbours.

        Tokens that are no text do not end a run: decoding drops them first.
        """
        if not self._byte_ids:
            return False
        return next((i in self._byte_ids for i in reversed(token_ids) if self._is_text(i)), False)

    def _try_template(self) -> None:
        """Raise `ConfigError` when the template does not end; one that refuses the trial may take others."""
        if self._template is None:
            return
        try:
            run_limited(partial(self._template.render, TRIAL), TEMPLATE_LIMIT_S)
        except TimeoutError as error:
            problem = f"a chat of one short message is {error}"
            raise ConfigError("chat_template", self._pretrained.name_or_path, problem) from None
        except Exception:  # noqa: BLE001 - it may demand a system message, or two turns
            pass

    def _check_fits(self, texts: Sequence[str], max_tokens: int | None) -> None:
        if self._bound is None or max_tokens is None:
            return
        needed, limit = sum(map(self._bound.count, texts)), max_tokens * self._bound.bytes_per_token
        if needed > limit:
            raise PromptTooLong("prompt bytes", needed, limit)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize; the ids are the same either way."""
        if len(text) <= LONG_TEXT_CHARS:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def _is_text(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._backend.id_to_token(token_id) is not None


def _template_of(pretrained: PreTrainedTokenizerFast) -> ChatTemplate | None:
    """Return the template of a model for chats without tools; None also when none of several is that."""
    source = default_template(pretrained.chat_template)
    return None if source is None else ChatTemplate(source, pretrained.special_tokens_map)


class TextStream:
    """Turns the tokens of one sequence into text deltas that never split a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []
        self._emitted_len = 0
        """Characters of the window's text that were returned. Invariant: they are final."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that became final, possibly none."""
        self._pending += token_ids
        if self._tokenizer.ends_in_byte_run(self._pending):
            return ""
        text = self._window_text()
        final = text.removesuffix(_INCOMPLETE)
        delta = final[self._emitted_len :]
        if final == text and len(text) > self._emitted_len:
            self._context, self._pending = self._pending, []
            self._emitted_len = len(self._tokenizer.decode(self._context))
        else:
            self._emitted_len = max(self._emitted_len, len(final))
        return delta

    def flush(self) -> str:
        """Return the text that was still held back; the sequence is over."""
        text = self._window_text()
        delta = text[self._emitted_len :]
        self._emitted_len = len(text)
        return delta

    def _window_text(self) -> str:
        return self._tokenizer.decode([*self._context, *self._pending])
