"""Which tokens have text of their own, and which are bytes of characters that take several of them.

Theory of operation: two decoders make text out of bytes. `ByteLevel` writes a byte as a printable character
and decodes the bytes of all tokens together, in which what is no text becomes U+FFFD piece by piece.
`ByteFallback` has a token `<0x..>` for each byte and decodes a run of them as a whole: all of it becomes
U+FFFD when any of it is no text. With every other decoder a token is text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend

INCOMPLETE = "\ufffd"
"""How decoders show bytes that begin a character and do not end it."""

LONGEST_BEGUN = 3
"""Bytes of a character without its last one."""

_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes behind the tokens of a tokenizer; holds no state between calls."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        decoder = backend.decoder
        kinds = set(_kinds(json.loads(decoder.__getstate__()))) if decoder is not None else set()
        self._is_byte_level = "ByteLevel" in kinds
        self._bytes = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        self.has_runs = "ByteFallback" in kinds
        """Whether bytes that follow each other are decoded as a whole."""

    def of(self, token_id: int) -> bytes | None:
        """Return the bytes of a token; None when it has text of its own."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self.has_runs:
            byte = _FALLBACK.fullmatch(token)
            return bytes.fromhex(byte[1]) if byte else None
        if not self._is_byte_level:
            return None
        if self._bytes.keys() >= set(token):
            return bytes(map(self._bytes.__getitem__, token))
        # A token that was added to the vocabulary, as it is written.
        return token.encode()


def begun(data: bytes) -> bytes:
    """Return the bytes at the end of some bytes that begin a character and do not end it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-LONGEST_BEGUN:])
    held, _ = decoder.getstate()
    # Python waits for the second half of what would be a surrogate, which text never has.
    return held if held.decode(errors="replace") == INCOMPLETE else b""


def byte_symbols() -> list[str]:
    """Return the printable character that byte-level tokenizers use for each byte.

    Printable Latin-1 bytes stand for themselves, the others take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    """Yield what a decoder consists of."""
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)
