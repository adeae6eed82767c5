"""Turns tokens into text as they come, and finds stop strings and their possible beginnings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sensorium.render.answers.syntax import Vocabulary

_REPLACEMENT_CHARACTER = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
# How many tokens may wait for the rest of a character, not counting those that never have text. No
# character has so many tokens. If more wait, they are bytes that never become a character, or
# replacement characters that the model wrote, and their text is given out.
_MAX_WAITING = 32
NUM_PROMPT_TOKENS = 6


class Detokenizer:
    """A decoder of single tokens that gives out text only when later tokens can't change it.

    A token's text depends on its neighbours (bytes of one character, leading spaces). So the last
    tokens are decoded together with those before them, and the text of the earlier ones is cut off.

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
        # A few tokens of the prompt, because the first new token may have a leading space or not,
        # depending on the token before it.
        self._token_ids = list(prompt_token_ids[-NUM_PROMPT_TOKENS:])
        self._prefix_start = 0
        self._read_end = len(self._token_ids)

    def add(self, token_id: int) -> str:
        """Add a token, and return the text that is complete now."""
        self._token_ids.append(token_id)
        if self._num_waiting >= _MAX_WAITING:
            waiting = self._list_with_text(self._read_end, len(self._token_ids))
            self._token_ids[self._read_end :] = waiting
        prefix = self._decode(self._prefix_start, self._read_end)
        text = self._decode(self._prefix_start, len(self._token_ids))
        is_whole = not text.endswith(_REPLACEMENT_CHARACTER)
        is_late = self._num_waiting >= _MAX_WAITING
        if is_late or (is_whole and len(text) > len(prefix)):
            return self._take(text, prefix)
        return ""

    def finish(self) -> str:
        """Return the rest of the text, whether its last character is complete or not."""
        prefix = self._decode(self._prefix_start, self._read_end)
        return self._take(self._decode(self._prefix_start, len(self._token_ids)), prefix)

    def save(self) -> tuple[tuple[int, ...], int]:
        """Return the last tokens, and how many of them gave their text, for `restore`.

        Their number doesn't grow with the answer: tokens that never have text are left out.
        """
        read = self._list_with_text(self._prefix_start, self._read_end)
        return (*read, *self._list_with_text(self._read_end, len(self._token_ids))), len(read)

    @classmethod
    def restore(
        cls, tokenizer: Any, token_ids: tuple[int, ...], num_read: int, **options: Any
    ) -> Detokenizer:
        """Return a detokenizer that goes on where another one was saved.

        The `options` are those of `__init__` about special tokens.
        """
        restored = cls(tokenizer, **options)
        restored._token_ids = list(token_ids)
        restored._read_end = num_read
        return restored

    @property
    def _num_waiting(self) -> int:
        return len(self._token_ids) - self._read_end

    def _list_with_text(self, start: int, end: int) -> list[int]:
        return [i for i in self._token_ids[start:end] if not self._is_silent(i)]

    def _is_silent(self, token_id: int) -> bool:
        """Return whether a token has no text anywhere: it is special, or not in the vocabulary."""
        tokenizer = self._tokenizer
        if token_id >= len(tokenizer):
            return True
        if not self._skips_special:
            return token_id in self._dropped
        is_skipped = not tokenizer.decode([token_id], skip_special_tokens=True)
        return is_skipped and bool(tokenizer.decode([token_id], skip_special_tokens=False))

    def _take(self, text: str, prefix: str) -> str:
        self._prefix_start, self._read_end = self._read_end, len(self._token_ids)
        return text[len(prefix) :]

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
    """Return the stop string that ends first in the new characters, and where it begins.

    If several end at the same place, it is the longest one, so that the result does not depend on
    how tokens divide the text.
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
    """Return how many characters at the end of the text may begin a stop string."""
    longest = 0
    for candidate in stop:
        for length in range(min(len(candidate) - 1, len(text)), longest, -1):
            if text.endswith(candidate[:length]):
                longest = length
                break
    return longest
