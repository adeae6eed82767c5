"""One completion while it grows: its tokens, its text, where a stop string ends it, and how much
of it has been streamed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sensorium.engine.outputs.detokenizer import Detokenizer, count_held_back, find_stop
from sensorium.types.outputs import CompletionDelta, CompletionOutput, Logprob
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs

_MAX_TOKEN_TEXTS = 2**16
TokenText = Callable[[int], str]


class Completion:
    """`last`: the core's last news of it, or the news in which a stop string was found."""

    def __init__(
        self, request: EngineCoreRequest, index: int, tokenizer: Any, get_text: TokenText
    ) -> None:
        self.index = index
        self.last: EngineCoreOutput | None = None
        self.stop_string: str | None = None
        self._params = request.sampling_params
        self._get_text = get_text
        self._eos_token_ids = frozenset(request.eos_token_ids)
        self._detokenizer = Detokenizer(
            tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
            kept_special_token_ids=self._params.kept_special_token_ids,
        )
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text_end: int | None = None  # where a stop string cuts the text
        self._num_taken_characters = 0
        self._num_taken_tokens = 0
        self._is_ended = False  # its last delta was taken

    def add(self, output: EngineCoreOutput) -> None:
        """Nothing may be added behind its end."""
        self._logprobs.extend(output.logprobs)
        for token_id in output.new_token_ids:
            self._token_ids.append(token_id)
            length = len(self._detokenizer.text)
            if not self._is_stop_token(output, token_id) or self._params.include_stop_str_in_output:
                self._detokenizer.add(token_id)
            if output.finish_reason is not None:
                self._detokenizer.finish()
            if self._params.stop and len(self._token_ids) > self._params.min_tokens:
                self._apply_stop(num_new_characters=len(self._detokenizer.text) - length)
        if output.finish_reason is not None and not output.new_token_ids:
            self._detokenizer.finish()
        if output.finish_reason is not None or self.stop_string is not None:
            self.last = output

    def _is_stop_token(self, output: EngineCoreOutput, token_id: int) -> bool:
        """Whether it ended the answer and is no part of it. The last token of an answer that its
        grammar completes is.
        """
        if output.finish_reason is not FinishReason.STOP:
            return False
        may_be_text = self._params.structured_outputs is not None and output.stop_token_id is None
        return not may_be_text or token_id in self._eos_token_ids

    def _apply_stop(self, *, num_new_characters: int) -> None:
        text = self._detokenizer.text
        found = find_stop(text, self._params.stop, num_new_characters=num_new_characters)
        if found is not None:
            self.stop_string, start = found
            is_included = self._params.include_stop_str_in_output
            self._text_end = start + (len(self.stop_string) if is_included else 0)

    def take_delta(self, *, is_last: bool = False) -> CompletionDelta | None:
        """What is new and can't change any more; `None` if that is nothing. `is_last`: nothing
        follows, even if it has not ended.
        """
        is_last = is_last or self.last is not None
        if self._is_ended or (not is_last and self._num_taken_tokens == len(self._token_ids)):
            return None
        text = self._detokenizer.text[: self._text_end]
        text_end = len(text) - (0 if is_last else count_held_back(text, self._params.stop))
        first_token = self._num_taken_tokens
        delta = CompletionDelta(
            index=self.index,
            text=text[self._num_taken_characters : text_end],
            token_ids=tuple(self._token_ids[first_token:]),
            finish_reason=self._finish_reason if is_last else None,
            stop_reason=self._stop_reason if is_last else None,
            logprobs=self._make_logprobs(first_token),
        )
        self._num_taken_characters, self._num_taken_tokens = text_end, len(self._token_ids)
        self._is_ended = is_last
        return delta

    def make_output(self) -> CompletionOutput:
        """What there is of it."""
        logprobs = self._make_logprobs(0)
        return CompletionOutput(
            index=self.index,
            text=self._detokenizer.text[: self._text_end],
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            cumulative_logprob=None if logprobs is None else sum(e.logprob for e in self._logprobs),
            logprobs=logprobs,
        )

    @property
    def _finish_reason(self) -> FinishReason | None:
        """One that has not ended was given up with its siblings."""
        if self.stop_string is not None:
            return FinishReason.STOP
        return FinishReason.ABORT if self.last is None else self.last.finish_reason

    @property
    def _stop_reason(self) -> str | int | None:
        if self.stop_string is not None:
            return self.stop_string
        return None if self.last is None else self.last.stop_token_id

    def _make_logprobs(self, first_token: int) -> tuple[dict[int, Logprob], ...] | None:
        if self._params.logprobs is None:
            return None
        new = zip(self._token_ids[first_token:], self._logprobs[first_token:], strict=True)
        return tuple(make_logprobs(self._get_text, token_id, entry) for token_id, entry in new)


def make_token_text(tokenizer: Any) -> TokenText:
    """The text of single tokens. Remembered: the likeliest ones are so at many positions, and a
    prompt may have a hundred thousand positions with twenty each.
    """

    @lru_cache(maxsize=_MAX_TOKEN_TEXTS)
    def get_text(token_id: int) -> str:
        text: str = tokenizer.decode([token_id])
        return text

    return get_text


def make_logprobs(get_text: TokenText, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
    """The likeliest tokens at a position, and always the one that stands there."""
    ranked = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    logprobs = {
        top_id: Logprob(logprob=logprob, rank=rank, decoded_token=get_text(top_id))
        for rank, (top_id, logprob) in enumerate(ranked, start=1)
    }
    logprobs[token_id] = Logprob(
        logprob=entry.logprob, rank=entry.rank, decoded_token=get_text(token_id)
    )
    return logprobs
