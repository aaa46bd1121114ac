"""What a tokenizer knows of its tokens, which is what turns ids into text.

Not here: text to ids (`tokenizer.py`), the text of an answer, token by token (`stream.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.errors import ConfigError
from common.model.text.token_bytes import TokenBytes


class Vocabulary:
    """The tokens of a loaded model; holds no state between calls."""

    def __init__(self, pretrained: PreTrainedTokenizerBase) -> None:
        """Wrap a transformers tokenizer.

        Raises ConfigError when it has no `tokenizers` backend, without which text cannot be streamed.
        """
        if not isinstance(pretrained, PreTrainedTokenizerFast):
            raise ConfigError("model", type(pretrained).__name__, "the tokenizer has no tokenizer.json form")
        self.pretrained = pretrained
        self._backend = pretrained.backend_tokenizer
        self._bytes = TokenBytes(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self._special_tokens = {token.content: one for one, token in added.items() if token.special}
        self._special_ids = frozenset(self._special_tokens.values())

    @property
    def vocab_size(self) -> int:
        """Ids this tokenizer can produce, added tokens included; logits may be longer."""
        return len(self.pretrained)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that are no text, by what they are called."""
        return self._special_tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of some ids without special tokens; ids without a token count for nothing."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def is_text(self, token_id: int) -> bool:
        """Tell whether decoding takes notice of a token: it is none that is special, and there is one."""
        return token_id not in self._special_ids and self._backend.id_to_token(token_id) is not None

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes that a token is decoded as, with its neighbours; None if it has its own text."""
        return self._bytes.of(token_id)

    @property
    def has_byte_runs(self) -> bool:
        """Whether tokens that are bytes and follow each other are decoded as a whole."""
        return self._bytes.has_runs
