"""Text to token ids and back.

A chat template is a program of the model's author: its time is limited, and it is tried at start.

A text that cannot fit is refused before it is tokenized. A long one is tokenized as a batch of one, during
which other threads may run Python: `encode` of the backend lets none of them do so before it ends.

Not here: the text of an answer (`stream.py`, `vocabulary.py`), what can fit (`bound.py`), where a service
does this (`process.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.errors import ConfigError, InvalidRequest, PromptTooLong, Violation
from common.excerpt import excerpt
from common.model.folder.template_files import default_template
from common.model.text.bound import text_bound
from common.model.text.chat import Chat
from common.model.text.chat_template import ChatTemplate
from common.model.text.control_tokens import ControlTokens
from common.model.text.vocabulary import Vocabulary
from common.runtime.limited import run_limited

LONG_TEXT_CHARS = 4000
"""A longer text takes milliseconds to tokenize: nothing for the event loop."""

TEMPLATE_LIMIT_S = 5.0
"""Seconds in which a chat template has to render a chat; good ones take milliseconds."""

TRIAL = ({"role": "user", "content": "Hello"},)
"""The chat that a template is tried with at start."""

TRIAL_TURNS = (*TRIAL, {"role": "assistant", "content": "Hello"}, *TRIAL)
"""The chat that shows what it puts around turns."""


class Tokenizer(Vocabulary):
    """The tokenizer of a loaded model; holds no state between calls."""

    is_quick = True
    """Whether a short text takes a moment."""

    def __init__(
        self, pretrained: PreTrainedTokenizerBase, end_ids: Iterable[int] = (), *, has_chats: bool = True
    ) -> None:
        """Wrap a transformers tokenizer of a model whose sequences end with `end_ids`.

        Raises ConfigError as `Vocabulary` does, and when its chat template does not end, is none or leaves
        out what is said; it is not looked at when the tokenizer `has_chats` not.
        """
        super().__init__(pretrained)
        # A tokenizer.json may say to cut or to fill a text: settings of whoever trained, not of the model.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._bound = text_bound(self._backend, lambda text: len(self._ids(text, add_special_tokens=False)))
        self._before, self._after = self._around()
        self._template = template = _template_of(self.pretrained) if has_chats else None
        declared = map(self._backend.token_to_id, self.pretrained.chat_control_tokens or ())
        own = self._try(template) if template is not None else ()
        self.control_ids = frozenset({*self._special_ids, *end_ids, *declared, *own} - {None})
        self._control = ControlTokens(self._backend, self.control_ids)
        self._chat = Chat(template, self._control) if template is not None else None

    def encode(self, text: str, *, is_literal: bool = False, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a text, with the special tokens this model puts around one.

        A text that brings those in front itself gets them once. Control tokens that are written out in it are
        such tokens, or ordinary text when it `is_literal`.

        Raises: `PromptTooLong` when the text cannot fit into `max_tokens`, before it is tokenized; one that
        can, but does not, is returned. `InvalidRequest` when a literal text cannot be read as one.
        """
        self._check_fits([text], max_tokens)
        if is_literal:
            return [*self._before, *self._control.ids_of(self._control.split(text)), *self._after]
        ids = self._ids(text, add_special_tokens=True)
        num_before = len(self._before)
        # Twice in front: by the tokenizer and by whoever wrote the text.
        return ids[num_before:] if ids[num_before : 2 * num_before] == self._before else ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of a chat (`role` and `content` each) up to where the model's turn begins.

        A last turn of the assistant is continued. Control tokens that are written out in a message are
        ordinary text.

        Raises: InvalidRequest when the model has no chat template or its template refuses the messages;
        `PromptTooLong` as `encode` does. All contents count for it, also what the template would leave out.
        """
        if self._chat is None:
            raise InvalidRequest(
                [Violation("chat", "this model has no chat template; send text or token ids")]
            )
        self._check_fits([message.get("content", "") for message in messages], max_tokens)
        try:
            pieces = run_limited(partial(self._chat.pieces, messages), TEMPLATE_LIMIT_S)
        except (InvalidRequest, MemoryError):
            raise
        except TimeoutError as error:
            raise InvalidRequest([Violation("chat", f"the chat template has {error}")]) from None
        except Exception as refusal:  # noqa: BLE001 - a program of the model's author may raise anything
            # Its words may quote a message, and what is said here is logged: so is the cause of an error.
            words = str(refusal)
            is_own = self._template is not None and self._template.says(words)
            problem = f"the chat template refused: {excerpt(words) if is_own else type(refusal).__name__}"
            raise InvalidRequest([Violation("chat", problem)]) from None
        self._check_fits(pieces, max_tokens)
        if len(pieces) > 1:
            return self._control.ids_of(pieces)
        return self._ids(pieces[0], add_special_tokens=False)

    def _try(self, template: ChatTemplate) -> set[int]:
        """Return the added tokens that a template puts around the turns of a chat.

        Raises: `ConfigError` when it does not end, is none, or leaves out what is said in the trial; one that
        refuses that may take others.
        """
        said = self._rendered(partial(template.render, TRIAL))
        if said is not None and TRIAL[0]["content"] not in said:
            # Some take contents as lists of parts, and pass over a text without a word.
            problem = (
                "leaves out what the user of a chat says; it may take contents in another form than text"
            )
            raise ConfigError("chat_template", self.pretrained.name_or_path, problem)
        text = self._rendered(partial(template.render_closed, TRIAL_TURNS)) or ""
        added = self._backend.get_added_tokens_decoder()
        found = added.keys() & self._ids(text, add_special_tokens=False)
        # Some vocabularies have runs of white space among them, which are text in templates too.
        return {one for one in found if not added[one].content.isspace()}

    def _rendered(self, render: Callable[[], str]) -> str | None:
        """Return what a template makes of a trial; None when it refuses it."""
        try:
            return run_limited(render, TEMPLATE_LIMIT_S)
        except TimeoutError as error:
            problem = f"a chat of a few short messages is {error}"
            raise ConfigError("chat_template", self.pretrained.name_or_path, problem) from None
        except TemplateSyntaxError as error:
            problem = f"is no template, at line {error.lineno}: {excerpt(str(error.message))}"
            raise ConfigError("chat_template", self.pretrained.name_or_path, problem) from error
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - it may demand a system message, or an end after the first turn
            return None

    def _around(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer puts in front of a text and after it."""
        bare, whole = (self._ids("a", add_special_tokens=add) for add in (False, True))
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        return [], []

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


def _template_of(pretrained: PreTrainedTokenizerFast) -> ChatTemplate | None:
    """Return the template of a model for chats without tools; None also when none of several is that."""
    source = default_template(pretrained.chat_template)
    return None if source is None else ChatTemplate(source, pretrained.special_tokens_map)
