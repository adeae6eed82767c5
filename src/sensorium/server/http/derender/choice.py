"""One choice of a generated answer, from its tokens to what a client reads. Tokenizers are slow:
not on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from sensorium.engine.outputs.text_reader import UNKNOWN, TextReader
from sensorium.render.answers.answer import AnswerContext, AnswerDelta
from sensorium.render.answers.format import AnswerFormat
from sensorium.render.answers.reader import AnswerReader
from sensorium.server.http.derender.state import ChoiceState
from sensorium.server.http.errors import ApiError
from sensorium.server.http.openai.chat_answers import read_piece
from sensorium.server.http.protocol.answers import PromptTokensDetails, Usage
from sensorium.server.http.protocol.derender import (
    MAX_TOKENS,
    WireGenerateChoice,
    WireGenerateResponse,
)
from sensorium.server.http.protocol.logprobs import ChatLogprobs
from sensorium.types.errors import RequestError, at
from sensorium.types.sampling import SamplingParams

_Struct = TypeVar("_Struct")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How all choices of an answer are read. `params`, `eos_token_ids`: what ends a text."""

    tokenizer: Any
    params: SamplingParams
    format: AnswerFormat
    context: AnswerContext
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceNews:
    """`finish_reason`: `None` as long as it goes on. `offset`: where the text of these tokens
    begins, as completions count it. `num_tool_calls`: so far.
    """

    index: int
    is_first: bool
    answer: AnswerDelta
    num_tool_calls: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: ChatLogprobs | None
    offset: int


class ChoiceReader:
    """From its beginning, behind `prompt_token_ids`, or from where `state` was saved."""

    def __init__(
        self,
        reading: Reading,
        *,
        prompt_token_ids: tuple[int, ...] = (),
        state: ChoiceState | None = None,
    ) -> None:
        text_state = None if state is None else state.text
        self._text = TextReader(
            reading.tokenizer,
            reading.params,
            prompt_token_ids=prompt_token_ids,
            state=text_state,
            eos_token_ids=reading.eos_token_ids,
        )
        self._answer = (
            reading.format.start(reading.context) if state is None else _resume(reading, state)
        )
        self._offset = 0 if state is None else state.offset
        self._is_first = state is None

    @property
    def is_ended(self) -> bool:
        """Whether its last news were told."""
        return self._text.is_ended

    def add(self, choice: WireGenerateChoice, path: str, *, is_whole: bool) -> ChoiceNews:
        """`path` names the choice in errors. `is_whole`: nothing follows, whatever it says."""
        finish_reason = choice.finish_reason or ("abort" if is_whole else None)
        is_told = "stop_reason" in choice.model_fields_set
        token_ids = tuple(choice.token_ids or ())
        text = self._text.add(
            token_ids,
            finish_reason=finish_reason,
            stop_reason=choice.stop_reason if is_told else UNKNOWN,
        )
        answer = read_piece(self._answer, text, is_last=self._text.is_ended)
        logprobs = _read_logprobs(choice, path)
        offset = self._offset
        self._offset += sum(len(entry.token) for entry in logprobs.content) if logprobs else 0
        stop_string = self._text.stop_string
        return ChoiceNews(
            index=choice.index,
            is_first=self._is_first,
            answer=answer,
            num_tool_calls=self._answer.num_tool_calls,
            token_ids=token_ids,
            finish_reason=finish_reason if stop_string is None else "stop",
            stop_reason=choice.stop_reason if stop_string is None else stop_string,
            logprobs=logprobs,
            offset=offset,
        )

    def save(self) -> ChoiceState:
        return ChoiceState(self._text.save(), self._answer.state, self._offset)


def _resume(reading: Reading, state: ChoiceState) -> AnswerReader:
    with at("stream_state"):
        return reading.format.resume(reading.context, state.answer)


def _read_logprobs(choice: WireGenerateChoice, path: str) -> ChatLogprobs | None:
    if choice.logprobs is None or choice.logprobs.get("content") is None:
        return None
    return convert(choice.logprobs, ChatLogprobs, f"{path}.logprobs")


def convert(value: Any, kind: type[_Struct], path: str) -> _Struct:
    """As a struct; an `ApiError` names what is wrong with it."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ApiError(f"{path}: {error}", param=path) from error


def check_num_tokens(field: str, *responses: WireGenerateResponse) -> None:
    """Raise a `RequestError` if the answers in a field have more tokens than one call may have."""
    num_tokens = sum(
        len(choice.token_ids or ()) for response in responses for choice in response.choices
    )
    if num_tokens > MAX_TOKENS:
        raise RequestError(
            f"has {num_tokens} tokens; at most {MAX_TOKENS} are allowed in one call", path=(field,)
        )


def count_prompt_tokens(
    response: WireGenerateResponse, given: int | None, prompt_token_ids: tuple[int, ...]
) -> int:
    """What the caller says, what the answer says, or what is there."""
    told = None if response.usage is None else response.usage.prompt_tokens
    counts = (given, told, len(prompt_token_ids))
    return next(count for count in counts if count is not None)


def make_usage(
    num_prompt_tokens: int, num_completion_tokens: int, *responses: WireGenerateResponse
) -> Usage:
    """With what was cached, where all of the answers know it."""
    cached = [_get_num_cached(response) for response in responses]
    known = [count for count in cached if count is not None]
    has_details = bool(known) and len(known) == len(cached)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(known)) if has_details else None,
    )


def _get_num_cached(response: WireGenerateResponse) -> int | None:
    usage = response.usage
    details = None if usage is None else usage.prompt_tokens_details
    count = None if details is None else details.get("cached_tokens")
    return count if type(count) is int and 0 <= count < 2**53 else None
