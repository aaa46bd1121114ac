"""The text of an answer, token by token: what its tokens add to the text of the prompt.

Theory of operation: what a token reads like depends on those before it: decoders drop the space of a first
word, put one before all others, or make a character out of several tokens. So deltas are differences of
decoded text over a window of tokens, which begins with the last ones of the prompt.

    | context, of the prompt or shown | pending |
      text of the window that was shown  ...  held back

Only two things can still change when another token comes: a character whose last bytes are not there, and a
run of byte-fallback tokens, which is decoded as a whole. These are held back. The concatenation of all deltas
is what `Vocabulary.decode` makes of prompt and answer beyond what it makes of the prompt. Bytes at the very
end that begin a character, and no more, are never text.

Not here: stop strings (`stops.py`), which tokens are bytes (`token_bytes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from common.excerpt import common_length
from common.model.text.token_bytes import INCOMPLETE, LONGEST_BEGUN, begun
from common.model.text.vocabulary import Vocabulary

CONTEXT = 6
"""Tokens, as many as decoders look back at: one for the space between two, more where those are spaces."""


class TextStream:
    """Turns the tokens of one answer into text deltas that never split a character.

    Takes the same time for each token, however many came before.
    """

    def __init__(self, tokenizer: Vocabulary, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        # Invariant: tokens that are text; others are dropped by decoding, wherever they stand.
        self._bytes = b""
        # Invariant: the last bytes of those behind the tokens, as many as can begin a character.
        self._is_in_run = False
        self._take(self._tail(prompt_ids))
        self._shown = tokenizer.decode(self._window)
        # Invariant: what the window's text begins with and was returned, or is the prompt's.

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that became final, possibly none."""
        self._take(token_ids)
        return "" if self._is_in_run else self._show()

    def flush(self) -> str:
        """Return the text that was still held back; the answer is over."""
        if self._is_in_run:
            # Else the begun character would take the whole run with it.
            del self._window[len(self._window) - len(begun(self._bytes)) :]
            self._bytes = b""
        return self._show()

    def _take(self, token_ids: Sequence[int]) -> None:
        for token_id in filter(self._tokenizer.is_text, token_ids):
            part = self._tokenizer.bytes_of(token_id)
            self._bytes = b"" if part is None else (self._bytes + part)[-LONGEST_BEGUN:]
            self._is_in_run = part is not None and self._tokenizer.has_byte_runs
            self._window.append(token_id)

    def _show(self) -> str:
        text = self._tokenizer.decode(self._window)
        is_begun = bool(begun(self._bytes))
        if is_begun:
            text = text.removesuffix(INCOMPLETE)
        # They part where the answer completes a character that the prompt begins.
        delta = text[common_length(self._shown, text) :]
        if delta:
            self._shown = text
        if len(self._window) > 2 * CONTEXT and not is_begun:
            self._window = self._window[-CONTEXT:]
            self._shown = self._tokenizer.decode(self._window)
        return delta

    def _tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return as many of the last tokens of a prompt as the text of the next ones depends on."""
        before: list[int] = []
        run: list[int] = []
        for token_id in filter(self._tokenizer.is_text, reversed(prompt_ids)):
            is_byte = self._tokenizer.has_byte_runs and self._tokenizer.bytes_of(token_id) is not None
            if is_byte and not before:
                run.append(token_id)
            elif len(before) < CONTEXT:
                before.append(token_id)
            else:
                break
        run.reverse()
        # With nothing before it the run shows that an answer does not begin a text.
        return before[::-1] + self._open_end(run) if before else run

    def _open_end(self, run: list[int]) -> list[int]:
        """Return what an answer may go on with of a run of byte tokens: a character that it begins.

        The others are text of the prompt, also if an answer goes on with bytes that are none.
        """
        data = b"".join(filter(None, map(self._tokenizer.bytes_of, run)))
        num_done = len(data) - len(begun(data))
        try:
            data[:num_done].decode()
        except UnicodeDecodeError:
            return run
        return run[num_done:]
