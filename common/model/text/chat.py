"""Turns a chat into text in which the template's control tokens are told apart from those that people wrote.

Theory of operation: whoever writes a turn must not open or close one, so control tokens in contents are
ordinary text. A template may trim, move, drop or repeat a content; where such a token ends up is seen by a
character in its place that no message has. Nothing is believed of a template: with the tokens put back its
text must be the one that it makes of the chat as it came, and it must not make a control token out of parts
of which one is a message. What cannot be shown is refused.

    messages -> hide tokens -> render -> split where they were hidden -> pieces

Not here: the ids of the pieces (`control_tokens.py`), the template itself (`chat_template.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from common.errors import InvalidRequest, Violation
from common.model.text.chat_template import ChatTemplate
from common.model.text.control_tokens import ControlTokens

Messages = Sequence[Mapping[str, str]]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "model"})
"""Roles that templates write into control tokens, as <|user|>."""

_FIRST_SPARE, _END_SPARE = 0x100000, 0x10FFF0
"""Characters for private use: one that no message has stands for something else while a chat is rendered."""


class Chat:
    """A template beside the control tokens of its model; holds no state between calls."""

    def __init__(self, template: ChatTemplate, control: ControlTokens) -> None:
        self._template = template
        self._control = control

    def pieces(self, messages: Messages) -> list[str]:
        """Return the text of a chat in pieces; control tokens that are ordinary text stand at odd places.

        Raises: `InvalidRequest` when a role, or what the template makes of the messages, cannot be told from
        its own control tokens; whatever the template raises.
        """
        for at, message in enumerate(messages):
            self._check_role(message.get("role", ""), at)
        spare = _spare_characters(messages)
        marks: dict[str, str] = {}
        hidden = [{**one, "content": self._hide(one.get("content", ""), marks, spare)} for one in messages]
        text = self._template.render(messages)
        joins = [self._control.may_join(one["content"]) for one in hidden]
        if not marks and not any(joins):
            return [text]
        marked = self._template.render(hidden) if marks else text
        pieces = _split(marked, {mark: written for written, mark in marks.items()})
        fence = _next(spare)
        fenced = [
            {**one, "content": fence + one["content"] + fence} if joins_it else one
            for one, joins_it in zip(hidden, joins, strict=True)
        ]
        own = self._control.found(self._template.render(fenced))
        if "".join(pieces) != text or own != self._control.found(marked):
            problem = (
                "the chat template mixes its own control tokens with text of the messages that reads like one"
            )
            raise InvalidRequest([Violation("chat", problem)])
        return pieces

    def _check_role(self, role: str, at: int) -> None:
        if self._control.spans(role) or (role not in ROLES and self._control.may_join(role)):
            # Refusals are logged, and a client may write anything there.
            problem = f"the role of message {at + 1} reads like a control token or a part of one"
            raise InvalidRequest([Violation("chat", problem)])

    def _hide(self, content: str, marks: dict[str, str], spare: Iterator[str]) -> str:
        """Return a content with a character for each control token; `marks` learns which stands for what."""
        pieces = self._control.split(content)
        for written in pieces[1::2]:
            if written not in marks:
                marks[written] = _next(spare)
        return "".join(marks[piece] if at % 2 else piece for at, piece in enumerate(pieces))


def _spare_characters(messages: Messages) -> Iterator[str]:
    """Yield characters that no message has; there are far more than a chat can have ways to write a token."""
    used = {character for message in messages for text in message.values() for character in text}
    yield from (one for one in map(chr, range(_FIRST_SPARE, _END_SPARE)) if one not in used)


def _next(spare: Iterator[str]) -> str:
    if (one := next(spare, None)) is not None:
        return one
    problem = "has control tokens as text beside every character that could stand for one of them"
    raise InvalidRequest([Violation("chat", problem)])


def _split(text: str, written: Mapping[str, str]) -> list[str]:
    """Return a text in pieces around the characters that stand for something, with what they stand for."""
    if not written:
        return [text]
    pieces = re.split(f"([{''.join(written)}])", text)
    return [written[piece] if at % 2 else piece for at, piece in enumerate(pieces)]
