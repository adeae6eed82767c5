"""Text from tokens as they come, the end at a stop string, and what may become one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sensorium.render.answers.vocabulary import Vocabulary

_REPLACEMENT_CHARACTER = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
# Tokens that may wait for the rest of a character, not counting those that have no text anywhere.
# Bytes that never become one, or characters that are this very one, are given out then: no
# character has so many tokens.
_MAX_WAITING = 32
NUM_PROMPT_TOKENS = 6


class Detokenizer:
    """Gives out text only when later tokens can't change it.

    A token's text depends on its neighbours (bytes of one character, leading spaces), so the last
    tokens are decoded together with the one before them, and what that one had given is cut off.

    Special tokens have no text, unless `skip_special_tokens` is false or they are kept.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: tuple[int, ...] = (),
        *,
        skip_special_tokens: bool = True,
        kept_special_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens and not kept_special_token_ids
        self._dropped: frozenset[int] = frozenset()
        if skip_special_tokens and kept_special_token_ids:
            self._dropped = get_special_token_ids(tokenizer).difference(kept_special_token_ids)
        # A few tokens of the prompt: the first new token may need a neighbour to know about its
        # leading space.
        self._token_ids = list(prompt_token_ids[-NUM_PROMPT_TOKENS:])
        self._prefix_start = 0
        self._read_end = len(self._token_ids)
        self.text = ""

    def add(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        if self._num_waiting >= _MAX_WAITING:
            self._token_ids[self._read_end :] = self._list_heard(
                self._read_end, len(self._token_ids)
            )
        prefix = self._decode(self._prefix_start, self._read_end)
        text = self._decode(self._prefix_start, len(self._token_ids))
        is_whole = not text.endswith(_REPLACEMENT_CHARACTER)
        is_late = self._num_waiting >= _MAX_WAITING
        if is_late or (is_whole and len(text) > len(prefix)):
            self._take(text, prefix)

    def finish(self) -> None:
        """Give out the rest, complete or not."""
        prefix = self._decode(self._prefix_start, self._read_end)
        self._take(self._decode(self._prefix_start, len(self._token_ids)), prefix)

    def save(self) -> tuple[tuple[int, ...], int]:
        """What `restore` goes on with, apart from the text: the last tokens, and how many of them
        have given their text. They don't grow with the answer: what leaves no trace in any text
        is left out.
        """
        read = self._list_heard(self._prefix_start, self._read_end)
        return (*read, *self._list_heard(self._read_end, len(self._token_ids))), len(read)

    @classmethod
    def restore(
        cls, tokenizer: Any, token_ids: tuple[int, ...], num_read: int, **options: Any
    ) -> Detokenizer:
        """`options`: what `__init__` takes about special tokens."""
        restored = cls(tokenizer, **options)
        restored._token_ids = list(token_ids)
        restored._read_end = num_read
        return restored

    @property
    def _num_waiting(self) -> int:
        return len(self._token_ids) - self._read_end

    def _list_heard(self, start: int, end: int) -> list[int]:
        return [i for i in self._token_ids[start:end] if not self._is_silent(i)]

    def _is_silent(self, token_id: int) -> bool:
        """Whether it is skipped wherever it stands: a special token, or none of the vocabulary."""
        tokenizer = self._tokenizer
        if token_id >= len(tokenizer):
            return True
        if not self._skips_special:
            return token_id in self._dropped
        is_skipped = not tokenizer.decode([token_id], skip_special_tokens=True)
        return is_skipped and bool(tokenizer.decode([token_id], skip_special_tokens=False))

    def _take(self, text: str, prefix: str) -> None:
        self.text += text[len(prefix) :]
        self._prefix_start, self._read_end = self._read_end, len(self._token_ids)

    def _decode(self, start: int, end: int) -> str:
        token_ids = self._token_ids[start:end]
        if self._dropped:
            token_ids = [token_id for token_id in token_ids if token_id not in self._dropped]
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)
        return text


@lru_cache(maxsize=8)
def get_special_token_ids(tokenizer: Any) -> frozenset[int]:
    return frozenset(Vocabulary.of(tokenizer).special_tokens.values())


def find_stop(text: str, stop: Sequence[str], *, num_new_characters: int) -> tuple[str, int] | None:
    """The stop string that ends first in the new characters (the longest of these) and its place:
    the same one however tokens part the text.
    """
    found = []
    for candidate in stop:
        start = text.find(candidate, max(0, len(text) - num_new_characters - len(candidate) + 1))
        if start >= 0:
            found.append((start + len(candidate), start, candidate))
    if not found:
        return None
    _, start, candidate = min(found)
    return candidate, start


def count_held_back(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop string."""
    longest = 0
    for candidate in stop:
        for length in range(min(len(candidate) - 1, len(text)), longest, -1):
            if text.endswith(candidate[:length]):
                longest = length
                break
    return longest
