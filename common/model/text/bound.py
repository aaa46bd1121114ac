"""How many bytes a text may have that can still fit into so many tokens, known before it is tokenized.

Theory of operation: tokenizing a megabyte takes most of a second, and a text that is far too long need not be
tokenized to be refused. No token stands for more bytes than the longest of the vocabulary has, times those of
which a normaliser makes one:

    bytes, less those of `uncounted`  <=  tokens x bytes_per_token

What a tokenizer drops or folds is not derived from its parts but tried, with a run of each kind of character.
Where such a run costs nothing, white space and control characters do not count; where a run of anything else
costs nothing, there is no bound, and only the size of a message limits a text.

Not here: the tokens (`tokenizer.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

MAX_SHRINK = 4
"""Most bytes of which a normaliser makes one: NFKC writes "A" for a mathematical letter of four bytes."""

_SYMBOLS = frozenset(ByteLevel.alphabet())
"""What byte-level vocabularies write for a byte."""

_BLANKS = frozenset(chr(code) for code in (*range(0x21), 0x7F))
"""White space and control characters of one byte."""

_PROBES = (*map(chr, range(0x80)), *"é\u0301\u200b\u2003中\U0010fffd")
"""Besides ASCII a letter, a mark, nothing to see, a space, a word and what no vocabulary has."""


@dataclass(frozen=True, slots=True)
class TextBound:
    """What is known of a tokenizer."""

    bytes_per_token: int
    """No token stands for more bytes of a text."""

    uncounted: bytes
    """Bytes that may be of no token."""

    def count(self, text: str) -> int:
        """Return the bytes of a text that need tokens."""
        return len(text.encode(errors="replace").translate(None, self.uncounted))


def text_bound(backend: Tokenizer, count_tokens: Callable[[str], int]) -> TextBound | None:
    """Return the bound of a tokenizer; None when a text of any length may be a few tokens."""
    longest = max(map(_num_bytes, backend.get_vocab()))
    bytes_per_token = longest * (MAX_SHRINK if backend.normalizer is not None else 1)
    # A run of four tokens' worth that costs fewer is dropped or folded; a prefix alone may cost one or two.
    dropped = {char for char in _PROBES if count_tokens(char * 4 * bytes_per_token) < 4}
    if not dropped <= _BLANKS:
        return None
    added = backend.get_added_tokens_decoder().values()
    swallowed = set(filter(str.isspace, _BLANKS)) if any(t.lstrip or t.rstrip for t in added) else set()
    return TextBound(bytes_per_token, "".join(sorted(dropped | swallowed)).encode())


def _num_bytes(token: str) -> int:
    return len(token) if _SYMBOLS.issuperset(token) else len(token.encode())
