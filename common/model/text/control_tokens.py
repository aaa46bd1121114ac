"""Which tokens steer a model, and how text that only reads like one of them becomes ids.

Theory of operation: a tokenizer cuts its added tokens out of a text before it looks at anything else, whoever
wrote them. Control tokens are those of them that it calls special, that end a sequence, or that the chat
template puts around turns. A text that holds some by right and others by accident is taken in pieces:

    text | control token that is ordinary text | text | ...

The pieces at odd places are tokenized as if nothing had been added to the vocabulary, each piece after a line
break, which keeps a tokenizer from putting the space of a first word in front of it (as transformers does for
its sanitize_control_tokens).

Not here: which pieces of a chat its authors wrote (`chat.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from tokenizers import Tokenizer as Backend

from common.errors import InvalidRequest, Violation
from common.excerpt import excerpt

_BEFORE = "\n"

_UNKNOWN = "\U00013000 \ua66e \U0010fffd"
"""Characters that vocabularies lack: a token for such ones may be special, and steers nothing."""


class ControlTokens:
    """The control tokens of a tokenizer; holds no state between calls."""

    def __init__(self, backend: Backend, ids: Iterable[int]) -> None:
        """Take the ids; those that cannot be written out, or stand for what is not known, do not count."""
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        unknown = self._without_added(_UNKNOWN)
        self._ids = frozenset(one for one in added.keys() & ids if one not in unknown)
        self._texts = sorted((added[one].content for one in self._ids), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or "(?!)")
        # Some are looked for in the normalised text, some are words of the vocabulary, which sees no other:
        # both may be written in other ways.
        self._has_other_spellings = backend.normalizer is not None and any(
            added[one].normalized or one in self._without_added(added[one].content) for one in self._ids
        )
        self._starts = frozenset(text[:end] for text in self._texts for end in range(1, len(text)))
        self._ends = frozenset(text[start:] for text in self._texts for start in range(1, len(text)))

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return where a text holds what the tokenizer takes for a control token, in characters."""
        if not self._has_other_spellings and self._pattern.search(text) is None:
            return []
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [(start, stop) for one, (start, stop) in pairs if one in self._ids and start < stop]

    def found(self, text: str) -> list[str]:
        """Return the control tokens in a text as they are written there, in order."""
        if self._has_other_spellings:
            return [text[start:stop] for start, stop in self.spans(text)]
        return self._pattern.findall(text)

    def may_join(self, text: str) -> bool:
        """Tell whether a text could be a part of a control token whose other parts stand around it."""
        bare = text.strip()
        longest = len(self._texts[0]) if self._texts else 0
        lengths = range(1, min(longest, len(bare) + 1))
        return (0 < len(bare) < longest and any(bare in one for one in self._texts)) or any(
            bare[:length] in self._ends or bare[-length:] in self._starts for length in lengths
        )

    def split(self, text: str) -> list[str]:
        """Return a text in pieces; control tokens in it stand at odd places."""
        pieces: list[str] = []
        done = 0
        for start, stop in self.spans(text):
            pieces += text[done:start], text[start:stop]
            done = stop
        return [*pieces, text[done:]]

    def ids_of(self, pieces: Sequence[str]) -> list[int]:
        """Return the ids of a text in pieces, of which those at odd places are ordinary text.

        Raises: `InvalidRequest` when the vocabulary has a control token for such a piece all the same.
        """
        (ids,) = self._encode([pieces[0]])
        plain = {piece: self._plain_ids(piece) for piece in set(pieces[1::2])}
        texts = self._ids_within(set(pieces[2::2]))
        for at, piece in enumerate(pieces[1:], 1):
            ids += plain[piece] if at % 2 else texts[piece]
        return ids

    def _ids_within(self, pieces: Collection[str]) -> dict[str, list[int]]:
        """Return the ids of pieces of text none of which begins it."""
        (before,) = self._encode([_BEFORE])
        after, alone = self._encode([_BEFORE + piece for piece in pieces]), self._encode(pieces)
        return {
            piece: ids[len(before) :] if ids[: len(before)] == before else bare
            for piece, ids, bare in zip(pieces, after, alone, strict=True)
        }

    def _plain_ids(self, piece: str) -> list[int]:
        (before,) = self._encode([_BEFORE])
        ids = self._without_added(_BEFORE + piece)
        ids = ids[len(before) :] if ids[: len(before)] == before else self._without_added(piece)
        if not self._ids.isdisjoint(ids):
            # The vocabulary has it as one of its words, which single characters are not.
            ids = [one for character in piece for one in self._without_added(character)]
        if not self._ids.isdisjoint(ids):
            problem = f"has {excerpt(repr(piece), 40)}, which this model cannot read as ordinary text"
            raise InvalidRequest([Violation("prompt", problem)])
        return ids

    def _encode(self, texts: Iterable[str]) -> list[list[int]]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    def _without_added(self, text: str) -> list[int]:
        backend = self._backend
        normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        splitter = backend.pre_tokenizer
        words = [normal] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(normal)]
        return [token.id for word in words for token in backend.model.tokenize(word)]
