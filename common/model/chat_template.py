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


class ChatTemplate:
    """A template and what it knows beside the messages; may be used on any thread."""

    def __init__(self, source: str, variables: Mapping[str, object]) -> None:
        self._source = source
        self._variables = dict(variables)
        self._compiled: Template | None = None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return a chat as text, up to where the model's turn begins.

        Raises: whatever the template raises, when it is no template too.
        """
        if self._compiled is None:
            self._compiled = _compile(self._source)
        return self._compiled.render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
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
