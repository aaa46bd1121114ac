"""Where a decode service makes token ids of text, so that a template or a tokenizer holds up only itself.

Theory of operation: both are programs of the model's author, and run in native code that cannot be stopped.
Chats and long texts are read in one process, which is bounded and replaced (`common/runtime/confined.py`);
short texts in another one where the tokenizer has patterns of its own, which may take far longer than a text
is long. Without patterns a short text takes a moment, and is read where the service is.

Not here: what a text becomes (`tokenizer.py`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from common.errors import ConfigError, InvalidRequest, PromptTooLong, Violation
from common.model.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from common.model.text.vocabulary import Vocabulary
from common.runtime.confined import Confined, Ended
from common.telemetry.logging import log_fields

logger = logging.getLogger(__name__)

LIMIT_S = 10.0
"""Seconds in which a prompt has to become tokens; a megabyte takes one."""

ROOM_BYTES = 1 << 30
"""Memory that this may take beside what the tokenizer itself takes."""

Messages = Sequence[Mapping[str, str]]


class TextProcess:
    """Encodes as a `Tokenizer` does, in processes of its own; a context, for any thread."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        end_ids: Iterable[int] = (),
        limit_s: float = LIMIT_S,
        room_bytes: int = ROOM_BYTES,
    ) -> None:
        """Take the tokens of a model; nothing runs before `start`."""
        self._name = vocabulary.pretrained.name_or_path
        self.special_tokens = vocabulary.special_tokens

        def confined() -> Confined:
            state = vocabulary.pretrained, tuple(end_ids)
            return Confined(_make, *state, limit_s=limit_s, room_bytes=room_bytes)

        self._pretrained = vocabulary.pretrained
        self._long = confined()
        self._short = confined() if _has_patterns(vocabulary.pretrained) else None
        self._here: Tokenizer | None = None
        # Invariant: set by the start where short texts are read here.

    def start(self) -> None:
        """Start the processes; raises `ConfigError` when tokenizer or template cannot be used."""
        try:
            made = self._long.start()
            if self._short is not None:
                self._short.start()
        except Ended as end:
            problem = f"the tokenizer or the chat template has {end}"
            raise ConfigError("model", self._name, problem) from None
        if "problem" in made:
            raise ConfigError(*made["problem"])
        if self._short is None:
            self._here = Tokenizer(self._pretrained, made["control_ids"], has_chats=False)

    def close(self) -> None:
        """End the processes, also under a prompt that is read."""
        for process in filter(None, (self._long, self._short)):
            process.close()

    @property
    def is_quick(self) -> bool:
        """Whether a short text is read at once; else that takes another process."""
        return self._here is not None

    def encode(self, text: str, *, is_literal: bool = False, max_tokens: int | None = None) -> list[int]:
        """See `Tokenizer.encode`; raises `InvalidRequest` also when a limit ended it."""
        is_long = len(text) > LONG_TEXT_CHARS
        if self._here is not None and not is_long:
            return self._here.encode(text, is_literal=is_literal, max_tokens=max_tokens)
        order = {"text": text, "is_literal": is_literal, "max_tokens": max_tokens}
        return _ids(self._long if is_long or self._short is None else self._short, "text", order)

    def encode_chat(self, messages: Messages, *, max_tokens: int | None = None) -> list[int]:
        """See `Tokenizer.encode_chat`; raises `InvalidRequest` also when a limit ended it."""
        order = {"messages": list(map(dict, messages)), "max_tokens": max_tokens}
        return _ids(self._long, "chat", order)

    def __enter__(self) -> TextProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ids(process: Confined, field: str, order: Mapping[str, object]) -> list[int]:
    """Return what a process makes of a prompt, or raise what it says."""
    try:
        answer = process.ask(order)
    except Ended as end:
        logger.warning("text.ended", extra=log_fields(prompt=field, end=str(end)))
        what = "chat template or tokenizer" if field == "chat" else "tokenizer"
        raise InvalidRequest([Violation(field, f"the {what} of this model has {end}")]) from None
    if "too_long" in answer:
        raise PromptTooLong(*answer["too_long"])
    if "violations" in answer:
        raise InvalidRequest([Violation(*one) for one in answer["violations"]])
    if "broken" in answer:
        raise RuntimeError(f"{answer['broken']} while a {field} was read")
    ids: list[int] = answer["ids"]
    return ids


def _has_patterns(pretrained: PreTrainedTokenizerFast) -> bool:
    rules = json.loads(pretrained.backend_tokenizer.to_str())
    return '"Regex":' in json.dumps([rules["normalizer"], rules["pre_tokenizer"]])


def _make(pretrained: PreTrainedTokenizerFast, end_ids: Sequence[int]) -> tuple[Any, Callable[[Any], Any]]:
    """Return what a process says of itself, and what it answers; it runs there."""
    try:
        tokenizer = Tokenizer(pretrained, end_ids)
    except ConfigError as error:
        return {"problem": [error.field, str(error.value), error.problem]}, lambda _: None
    return {"control_ids": sorted(tokenizer.control_ids)}, lambda order: _answer(tokenizer, order)


def _answer(tokenizer: Tokenizer, order: Mapping[str, Any]) -> Mapping[str, object]:
    options = dict(order)
    try:
        if "messages" in options:
            return {"ids": tokenizer.encode_chat(options.pop("messages"), **options)}
        return {"ids": tokenizer.encode(options.pop("text"), **options)}
    except PromptTooLong as error:
        return {"too_long": [error.limit_name, error.needed, error.limit]}
    except InvalidRequest as error:
        return {"violations": [[one.field, one.problem] for one in error.violations]}
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - so is a panic of native code; its words may quote a prompt
        return {"broken": type(error).__name__}
