"""Reads the text of one completion from tokens that come in pieces.

A `TextReader` detokenizes, ends the text at a stop string, and gives out only text that later
tokens can't change. A completion of this engine has one reader from its first token to its last.
Tokens that come over the wire may be read by another process each time. Then only a `TextState` is
kept between two pieces, with a size that does not grow with the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sensorium.engine.outputs.detokenizer import Detokenizer, count_held_back, find_stop
from sensorium.types.errors import RequestError
from sensorium.types.sampling import SamplingParams

_MAX_STATE_TOKENS = 256
_MAX_STATE_CHARACTERS = 4096
_MAX_TOKEN_ID = 2**31 - 1
_MAX_COUNT = 2**53
UNKNOWN = object()  # a stop reason that the sender of the tokens did not give


class TextState(msgspec.Struct, frozen=True, array_like=True):
    """The state from which a reader goes on where another one has stopped."""

    token_ids: tuple[int, ...] = ()  # the last tokens
    num_read: int = 0  # how many of `token_ids` have given their text, from the first
    text: str = ""  # the end of the text, in which a stop string may have begun
    num_emitted: int = 0  # how many characters of `text` were given out, from the first
    num_tokens: int = 0  # all tokens so far
    is_ended: bool = False

    def check(self) -> None:
        """Raise a `RequestError` if no reader can have made this state, which came from outside."""
        is_short = len(self.token_ids) <= _MAX_STATE_TOKENS
        is_brief = len(self.text) <= _MAX_STATE_CHARACTERS
        are_tokens = all(0 <= token_id <= _MAX_TOKEN_ID for token_id in self.token_ids)
        is_read = 0 <= self.num_read <= len(self.token_ids)
        is_emitted = 0 <= self.num_emitted <= len(self.text)
        is_count = 0 <= self.num_tokens <= _MAX_COUNT
        if not (is_short and is_brief and are_tokens and is_read and is_emitted and is_count):
            raise RequestError("stream_state was not made by this server")


class TextReader:
    """The text of one completion while it grows.

    It begins with a prompt's tokens (the last few are enough) or with the state of an earlier
    reader. `eos_token_ids` end a sequence and are no part of its text. If there are none, they are
    unknown, and the last token of a sequence counts as one.
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
        self._options: dict[str, Any] = {
            "skip_special_tokens": params.skip_special_tokens,
            "kept_special_token_ids": params.kept_special_token_ids,
        }
        self._detokenizer = (
            Detokenizer(tokenizer, prompt_token_ids, **self._options)
            if state is None
            else self._restore(state.token_ids, state.num_read)
        )
        state = state or TextState()
        self._text = state.text
        self._text_end: int | None = None  # where a stop string cuts the text
        self._num_emitted = state.num_emitted
        self._num_tokens = state.num_tokens
        self.is_ended = state.is_ended
        self.stop_string: str | None = None

    @property
    def text(self) -> str:
        """The text so far, up to a stop string."""
        return self._text[: self._text_end]

    def add(
        self,
        token_ids: Sequence[int],
        *,
        finish_reason: str | None = None,
        stop_reason: object = None,
    ) -> str:
        """Add tokens, and return the new text that can't change any more.

        With a `finish_reason` these are the last tokens. `stop_reason` is the string or the token
        that ended the text, `None` for the end of a sequence, or `UNKNOWN`. Tokens behind a stop
        string are ignored.
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
        """Add one token, unless a stop string has ended the text.

        A closing token gives no text, unless `include_stop_str_in_output` is set.
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
        """Add the text of tokens that were waiting for the rest of a character."""
        self._text += self._detokenizer.finish()

    def take_text(self, *, is_last: bool = False) -> str:
        """Return the text since the last call, without an end that may begin a stop string.

        With `is_last` nothing follows, and nothing is held back.
        """
        text = self.text
        end = len(text) - (0 if is_last else count_held_back(text, self._params.stop))
        new, self._num_emitted = text[self._num_emitted : end], max(self._num_emitted, end)
        return new

    def save(self) -> TextState:
        """Return the state from which another reader can go on.

        It has the end of the text, in which a stop string may have begun, or nothing if the text
        has ended.
        """
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
        """Return whether the last token only ends the text.

        If a grammar ends the text, its last token is a part of the text.
        """
        if stop_reason is UNKNOWN:
            is_stop = token_id in self._params.stop_token_ids or not self._eos_token_ids
            is_end = is_stop or token_id in self._eos_token_ids
            return is_end and not self._completes_stop(token_id)
        if stop_reason is None:
            return not self._eos_token_ids or token_id in self._eos_token_ids
        return not isinstance(stop_reason, str)

    def _restore(self, token_ids: tuple[int, ...], num_read: int) -> Detokenizer:
        return Detokenizer.restore(self._tokenizer, token_ids, num_read, **self._options)

    def _completes_stop(self, token_id: int) -> bool:
        """Return whether a stop string ends in the text of the last token."""
        trial = self._restore(*self._detokenizer.save())
        new = trial.add(token_id) + trial.finish()
        found = find_stop(self._text + new, self._params.stop, num_new_characters=len(new))
        return found is not None
