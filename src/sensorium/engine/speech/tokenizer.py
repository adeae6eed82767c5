"""The tokenizer of a model as the rules of `speech` need it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any


class TextTokens:
    """A `SpeechTokenizer` over a tokenizer of Transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()

    def encode(self, text: str) -> Sequence[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def get_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; those of a character may be spread over several tokens."""
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        table = _make_byte_table()
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return self.decode([token_id]).encode()

    def get_id(self, token: str) -> int | None:
        return self._vocabulary.get(token)


@cache
def _make_byte_table() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Bytes that Latin-1 prints stand for themselves. The others have the characters from 256 on.
    """
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printed]
    table = {chr(byte): byte for byte in printed}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
