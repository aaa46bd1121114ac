"""Renders chats by the template of a model, which is a program of the model's author.

Theory of operation: templates are rendered in the sandbox that transformers makes for them, with what they
count on in it. A loop of a template can be stopped (`common/runtime/limited.py`), a single step of native
code cannot, and holds up the whole process. So the operators that make much out of little are bounded.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template
from jinja2.runtime import Context
from transformers.utils.chat_template_utils import _compile_jinja_template

MAX_LENGTH = 1 << 20
"""Items of a repeated text or list; what is longer fits no context."""

MAX_BITS = 1 << 16
"""Of a number."""

BOUNDED = frozenset({"*", "**"})


ASSISTANT = "assistant"
"""The role of the model; a last turn of it is continued."""

_ENDS = (0x10FFF0, 0x10FFFE)
"""Characters for private use, one of which marks the end of a turn that is continued."""


class CannotContinue(ValueError):
    """The template does not show where the last turn ends."""


class ChatTemplate:
    """A template and what it knows beside the messages; may be used on any thread."""

    def __init__(self, source: str, variables: Mapping[str, object]) -> None:
        self._source = source
        self._variables = dict(variables)
        self._compiled: Template | None = None

    def says(self, words: str) -> bool:
        """Tell whether words stand in the template itself; others may be those of a message."""
        return words in self._source

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return a chat as text, up to where the model's turn begins, or stands when the last one is its own.

        Raises: whatever the template raises, when it is no template too; `CannotContinue`.
        """
        if messages and messages[-1].get("role") == ASSISTANT:
            return self._render_open(messages)
        return self._render(messages, add_generation_prompt=True)

    def render_closed(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return a chat as text in which every turn has ended; raises as `render` does."""
        return self._render(messages, add_generation_prompt=False)

    def _render_open(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return a chat up to the end of its last content; transformers: its continue_final_message."""
        *turns, last = messages
        content = last.get("content", "")
        texts = [text for message in messages for text in message.values()]
        end = next((one for one in map(chr, range(*_ENDS)) if not any(one in text for text in texts)), "")
        if not end:
            raise CannotContinue("the messages have every character that could mark its end")
        # A template that trims takes the space away: then nothing before the end was meant to be seen either.
        tagged = {**last, "content": f"{content}{end} "}
        text = self._render([*turns, tagged], add_generation_prompt=False)
        stop = text.rfind(end)
        if stop < 0 or content.strip() not in text:
            raise CannotContinue("the assistant's last turn cannot be continued: it is left out or changed")
        return text[:stop] if text.startswith(f"{end} ", stop) else text[:stop].rstrip()

    def _render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        if self._compiled is None:
            self._compiled = _compile(self._source)
        return self._compiled.render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        )


def bounded_product(context: Context, symbol: str, left: Any, right: Any) -> Any:
    """Return `left * right` or `left ** right`; raises OverflowError where that would be very large."""
    if symbol == "**":
        size = left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
        result, limit = operator.pow, MAX_BITS
    else:
        size, limit = _product_size(left, right)
        result = operator.mul
    if size > limit:
        raise OverflowError(f"the result of {symbol} is too large")
    return result(left, right)


def _product_size(left: Any, right: Any) -> tuple[int, int]:
    """Return the size of a product and the most it may be."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length(), MAX_BITS
    for repeated, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(repeated, str | list | tuple):
            return len(repeated) * times, MAX_LENGTH
    return 0, MAX_LENGTH


def _compile(source: str) -> Template:
    # The empty template brings the filters, functions and extensions that transformers gives to all; others
    # share its environment, so changes are made on a layer above it.
    environment: Any = _compile_jinja_template("").environment.overlay()
    environment.intercepted_binops = BOUNDED
    environment.call_binop = bounded_product
    compiled: Template = environment.from_string(source)
    return compiled
