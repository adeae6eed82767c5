"""One completion's text from tokens that come in pieces, maybe to another process each time.

What `engine.completion` makes of a core's outputs, this makes of tokens that came over the wire:
the same text, cut at the same stop string. Between two pieces there is only a `TextState`, whose
size does not grow with the answer.
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
UNKNOWN = object()  # a stop reason that nobody told


class TextState(msgspec.Struct, frozen=True, array_like=True):
    """`token_ids`: the last ones, of which `num_read` have given their text. `text`: the end of
    the text, in which a stop string may have begun; `num_told` characters of it are given out.
    """

    token_ids: tuple[int, ...] = ()
    num_read: int = 0
    text: str = ""
    num_told: int = 0
    num_tokens: int = 0
    is_ended: bool = False

    def check(self) -> None:
        """A `RequestError` for what can't be a state. It came from outside."""
        is_short = len(self.token_ids) <= _MAX_STATE_TOKENS
        is_brief = len(self.text) <= _MAX_STATE_CHARACTERS
        are_tokens = all(0 <= token_id <= _MAX_TOKEN_ID for token_id in self.token_ids)
        are_inside = 0 <= self.num_read <= len(self.token_ids) and 0 <= self.num_told <= len(
            self.text
        )
        is_count = 0 <= self.num_tokens <= _MAX_COUNT
        if not (is_short and is_brief and are_tokens and are_inside and is_count):
            raise RequestError("stream_state is none that this server has given")


class TextReader:
    """`params` say what ends the text. Either `prompt_token_ids` (the last few are enough) or the
    `state` of an earlier reader. `eos_token_ids`: those that end a sequence and are no part of its
    text; empty where nobody knows, then the last token is taken for one.
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
        self._text_end: int | None = None  # where a stop string cuts it
        self._num_told = state.num_told
        self._num_tokens = state.num_tokens
        self.is_ended = state.is_ended
        self.stop_string: str | None = None

    def add(
        self,
        token_ids: Sequence[int],
        *,
        finish_reason: str | None = None,
        stop_reason: object = None,
    ) -> str:
        """More tokens; the text that is new and can't change any more. `finish_reason`: nothing
        follows. `stop_reason`: the string or token that ended it, `None` for the end of a
        sequence. What comes behind a stop string is passed over.
        """
        if self.is_ended:
            return ""
        for index, token_id in enumerate(token_ids):
            if self.stop_string is not None:
                break
            is_last = finish_reason is not None and index == len(token_ids) - 1
            is_closing = is_last and finish_reason == "stop"
            is_closing = is_closing and self._is_closing(token_id, stop_reason)
            self._add_token(token_id, is_last=is_last, is_closing=is_closing)
        if finish_reason is not None and not token_ids:
            self._detokenizer.finish()
            self._take_text()
        self.is_ended = finish_reason is not None or self.stop_string is not None
        return self._tell()

    def save(self) -> TextState:
        """For the one who goes on. Of the text it has what a stop string may reach back to, and of
        one that has ended nothing.
        """
        if self.is_ended:
            return TextState(num_tokens=self._num_tokens, is_ended=True)
        token_ids, num_read = self._detokenizer.save()
        num_kept = max(map(len, self._params.stop), default=1) - 1
        cut = max(0, min(len(self._text) - num_kept, self._num_told))
        return TextState(
            token_ids=token_ids,
            num_read=num_read,
            text=self._text[cut:],
            num_told=self._num_told - cut,
            num_tokens=self._num_tokens,
        )

    def _add_token(self, token_id: int, *, is_last: bool, is_closing: bool) -> None:
        """A closing token gives no text, unless what stops it is to be in it."""
        self._num_tokens += 1
        if not is_closing or self._params.include_stop_str_in_output:
            self._detokenizer.add(token_id)
        if is_last:
            self._detokenizer.finish()
        num_new = self._take_text()
        if self._params.stop and self._num_tokens > self._params.min_tokens:
            found = find_stop(self._text, self._params.stop, num_new_characters=num_new)
            if found is not None:
                self.stop_string, start = found
                is_included = self._params.include_stop_str_in_output
                self._text_end = start + (len(self.stop_string) if is_included else 0)

    def _is_closing(self, token_id: int, stop_reason: object) -> bool:
        """Whether the last token only ends the text. That of a text which its grammar completes is
        a part of it.
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
        """Whether the last token's text has a stop string, where nobody says what ended it."""
        trial = self._restore(*self._detokenizer.save())
        trial.add(token_id)
        trial.finish()
        text = self._text + trial.text
        stop, num_new = self._params.stop, len(trial.text)
        return bool(stop) and find_stop(text, stop, num_new_characters=num_new) is not None

    def _take_text(self) -> int:
        """How many characters are new."""
        new, self._detokenizer.text = self._detokenizer.text, ""
        self._text += new
        return len(new)

    def _tell(self) -> str:
        text = self._text[: self._text_end]
        end = len(text) - (0 if self.is_ended else count_held_back(text, self._params.stop))
        told, self._num_told = text[self._num_told : end], max(self._num_told, end)
        return told
