"""Reads the text of one completion from tokens that come in pieces.

A `TextReader` detokenizes, ends the text at a stop string, and gives out only text that later
tokens can't change. A completion of this engine has one reader from its first token to its last.
Tokens that come over the wire may be read by another process each time. Then only a `TextState` is
kept between two pieces, with a size that does not grow with the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from sensorium.render.answers.syntax import Vocabulary
from sensorium.types.errors import RequestError
from sensorium.types.sampling import SamplingParams

_REPLACEMENT_CHARACTER = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
# How many tokens may wait for the rest of a character, not counting those that never have text. No
# character has so many tokens. If more wait, they are bytes that never become a character, or
# replacement characters that the model wrote, and their text is given out.
_MAX_WAITING = 32
# How many tokens of the prompt are read again, because the first new token may have a leading space
# or not, depending on the token before it.
NUM_PROMPT_TOKENS = 6
_MAX_STATE_TOKENS = 256
_MAX_STATE_CHARACTERS = 4096
_MAX_TOKEN_ID = 2**31 - 1
_MAX_COUNT = 2**53
UNKNOWN = object()  # a stop reason that the sender of the tokens did not give


class TextState(msgspec.Struct, frozen=True, array_like=True):
    """A state, fit for the wire, from which another `TextReader` can continue a text."""

    token_ids: tuple[int, ...] = ()  # the last tokens
    num_read: int = 0  # how many of `token_ids` have given their text, from the first
    text: str = ""  # the end of the text, in which a stop string may have begun
    num_emitted: int = 0  # how many characters of `text` were given out, from the first
    num_tokens: int = 0  # all tokens so far
    is_ended: bool = False

    def check(self) -> None:
        """Raise a `RequestError` if this state is invalid, since it may come from a client."""
        is_short = len(self.token_ids) <= _MAX_STATE_TOKENS
        is_brief = len(self.text) <= _MAX_STATE_CHARACTERS
        are_tokens = all(0 <= token_id <= _MAX_TOKEN_ID for token_id in self.token_ids)
        is_read = 0 <= self.num_read <= len(self.token_ids)
        is_emitted = 0 <= self.num_emitted <= len(self.text)
        is_count = 0 <= self.num_tokens <= _MAX_COUNT
        if not (is_short and is_brief and are_tokens and is_read and is_emitted and is_count):
            raise RequestError("stream_state must be one that this server has returned, unchanged")


class TextReader:
    """A reader that turns the token ids of one completion into text, up to a stop string.

    It begins after a prompt's tokens (the last few are enough), or continues from the `state` of an
    earlier reader. End-of-sequence tokens have no text. If no `eos_token_ids` are given, the last
    token of a text that has stopped counts as one.
    """

    def __init__(
        self,
        tokenizer: Any,
        params: SamplingParams,
        *,
        prompt_token_ids: tuple[int, ...] = (),
        state: TextState | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._eos_token_ids = frozenset(eos_token_ids)
        recent = prompt_token_ids[-NUM_PROMPT_TOKENS:]
        state = state or TextState(token_ids=recent, num_read=len(recent))
        self._detokenizer = self._make_detokenizer(state.token_ids, state.num_read)
        self._text = state.text
        self._text_end: int | None = None  # where a stop string cuts the text
        self._num_emitted = state.num_emitted
        self._num_tokens = state.num_tokens
        self.is_ended = state.is_ended
        self.stop_string: str | None = None

    @property
    def text(self) -> str:
        """Return the text so far, cut at a stop string."""
        return self._text[: self._text_end]

    def add(
        self,
        token_ids: Sequence[int],
        *,
        finish_reason: str | None = None,
        stop_reason: object = None,
    ) -> str:
        """Add generated token ids, and return the new text that later tokens can't change.

        A `finish_reason` is given only with the last tokens. `stop_reason` is the stop string or
        the stop token id that ended the text, `None` for an end-of-sequence token, or `UNKNOWN`.
        Tokens after a stop string are ignored.
        """
        if self.is_ended:
            return ""
        for index, token_id in enumerate(token_ids):
            is_last = finish_reason is not None and index == len(token_ids) - 1
            is_closing = is_last and finish_reason == "stop"
            is_closing = is_closing and self._is_closing(token_id, stop_reason)
            self.add_token(token_id, is_last=is_last, is_closing=is_closing)
        if finish_reason is not None and not token_ids:
            self.finish()
        self.is_ended = finish_reason is not None or self.stop_string is not None
        return self.take_text(is_last=self.is_ended)

    def add_token(self, token_id: int, *, is_last: bool = False, is_closing: bool = False) -> None:
        """Add one generated token, unless a stop string has already ended the text.

        With `is_last` no token follows. A token with `is_closing` only ends the text: its own text
        is left out, unless `include_stop_str_in_output` is set.
        """
        if self.stop_string is not None:
            return
        self._num_tokens += 1
        length = len(self._text)
        if not is_closing or self._params.include_stop_str_in_output:
            self._text += self._detokenizer.add(token_id)
        if is_last:
            self.finish()
        if self._params.stop and self._num_tokens > self._params.min_tokens:
            num_new = len(self._text) - length
            found = find_stop(self._text, self._params.stop, num_new_characters=num_new)
            if found is not None:
                self.stop_string, start = found
                is_included = self._params.include_stop_str_in_output
                self._text_end = start + (len(self.stop_string) if is_included else 0)

    def finish(self) -> None:
        """Add the text of tokens that were waiting for the rest of a UTF-8 character."""
        self._text += self._detokenizer.finish()

    def take_text(self, *, is_last: bool = False) -> str:
        """Return the text since the last call.

        Unless `is_last`, the end of the text is held back if it may begin a stop string.
        """
        text = self.text
        end = len(text) - (0 if is_last else count_held_back(text, self._params.stop))
        new, self._num_emitted = text[self._num_emitted : end], max(self._num_emitted, end)
        return new

    def save(self) -> TextState:
        """Return the state to continue from, which has no text if the text has ended."""
        if self.is_ended:
            return TextState(num_tokens=self._num_tokens, is_ended=True)
        token_ids, num_read = self._detokenizer.save()
        num_kept = max(map(len, self._params.stop), default=1) - 1
        cut = max(0, min(len(self._text) - num_kept, self._num_emitted))
        return TextState(
            token_ids=token_ids,
            num_read=num_read,
            text=self._text[cut:],
            num_emitted=self._num_emitted - cut,
            num_tokens=self._num_tokens,
        )

    def _is_closing(self, token_id: int, stop_reason: object) -> bool:
        """Return whether the last token only ends the text, so that its own text is left out.

        If a grammar ends the text, the last token is a part of the text.
        """
        if stop_reason is UNKNOWN:
            is_stop = token_id in self._params.stop_token_ids or not self._eos_token_ids
            is_end = is_stop or token_id in self._eos_token_ids
            return is_end and not self._completes_stop(token_id)
        if stop_reason is None:
            return not self._eos_token_ids or token_id in self._eos_token_ids
        return not isinstance(stop_reason, str)

    def _make_detokenizer(self, token_ids: tuple[int, ...], num_read: int) -> Detokenizer:
        return Detokenizer(
            self._tokenizer,
            token_ids,
            num_read,
            skip_special_tokens=self._params.skip_special_tokens,
            kept_special_token_ids=self._params.kept_special_token_ids,
        )

    def _completes_stop(self, token_id: int) -> bool:
        """Return whether the text of this token would complete a stop string."""
        trial = self._make_detokenizer(*self._detokenizer.save())
        new = trial.add(token_id) + trial.finish()
        found = find_stop(self._text + new, self._params.stop, num_new_characters=len(new))
        return found is not None


class Detokenizer:
    """A decoder of single tokens that returns text only when later tokens can't change it.

    A token's text depends on its neighbours (bytes of one character, leading spaces). So the last
    tokens are decoded together with those before them, and the text of the earlier ones is cut off.

    A new detokenizer continues after `token_ids`; the text of the first `num_read` of them was
    returned before. Special tokens have no text, unless `skip_special_tokens` is false or
    `kept_special_token_ids` has them.
    """

    def __init__(
        self,
        tokenizer: Any,
        token_ids: tuple[int, ...] = (),
        num_read: int = 0,
        *,
        skip_special_tokens: bool = True,
        kept_special_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens and not kept_special_token_ids
        self._dropped: frozenset[int] = frozenset()
        if skip_special_tokens and kept_special_token_ids:
            self._dropped = get_special_token_ids(tokenizer).difference(kept_special_token_ids)
        self._token_ids = list(token_ids)
        self._prefix_start = 0
        self._read_end = num_read

    def add(self, token_id: int) -> str:
        """Add a token, and return the text that is complete now, which may be empty."""
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
        """Return the text of all tokens that wait, even if their last character is incomplete."""
        prefix = self._decode(self._prefix_start, self._read_end)
        return self._take(self._decode(self._prefix_start, len(self._token_ids)), prefix)

    def save(self) -> tuple[tuple[int, ...], int]:
        """Return the `token_ids` and the `num_read` from which another detokenizer can continue.

        Tokens that never have text are left out, so that the number of tokens does not grow with
        the answer.
        """
        read = self._list_with_text(self._prefix_start, self._read_end)
        return (*read, *self._list_with_text(self._read_end, len(self._token_ids))), len(read)

    @property
    def _num_waiting(self) -> int:
        return len(self._token_ids) - self._read_end

    def _list_with_text(self, start: int, end: int) -> list[int]:
        return [i for i in self._token_ids[start:end] if not self._is_silent(i)]

    def _is_silent(self, token_id: int) -> bool:
        """Return whether a token never has text, because it is special or not in the vocabulary."""
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
    """Return the stop string that ends first in the new characters and where it begins, or `None`.

    The last `num_new_characters` of `text` are new. If several stop strings end at the same place,
    the longest one is returned, so that the result does not depend on how tokens divide the text.
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
    """Return how many characters at the end of the text may be the beginning of a stop string."""
    longest = 0
    for candidate in stop:
        for length in range(min(len(candidate) - 1, len(text)), longest, -1):
            if text.endswith(candidate[:length]):
                longest = length
                break
    return longest
