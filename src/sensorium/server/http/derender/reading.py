"""Turns generated tokens into text, reasoning and calls, choice by choice.

Nothing is kept between two calls: the client sends the state of a stream with each chunk, as it
came with the chunk before. The state is opaque to the client (base64 of msgpack), is checked when
it comes back, and grows with the number of choices, not with the length of the answer.

Tokenizers are slow, so none of this may run on the event loop.
"""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from sensorium.engine.outputs.text_reader import UNKNOWN, TextReader, TextState
from sensorium.render.answers.answer import AnswerContext
from sensorium.render.answers.format import AnswerFormat
from sensorium.render.answers.reader import AnswerReader
from sensorium.server.http.choices import Piece, count_characters
from sensorium.server.http.openai.chat import read_piece
from sensorium.server.http.protocol.answers import ChatLogprobs
from sensorium.server.http.protocol.fields import MAX_INTEGER
from sensorium.server.http.protocol.tokens import WireGenerateChoice, WireGenerateResponse
from sensorium.types.checking import check
from sensorium.types.errors import RequestError, at
from sensorium.types.sampling import SamplingParams

_VERSION = 1
_MAX_CHOICES = 128
_Checked = TypeVar("_Checked")


class ChoiceState(msgspec.Struct, frozen=True, array_like=True):
    """The state of one choice between two chunks."""

    text: TextState
    answer: Any = None  # the state of the reader that separates content, reasoning and calls
    offset: int = 0  # where the text of the next token begins, as completions count it


class StreamState(msgspec.Struct, frozen=True, array_like=True):
    """The state of a stream between two chunks."""

    version: int
    created: int
    num_completion_tokens: int
    choices: dict[int, ChoiceState]

    @classmethod
    def start(cls, created: int | None) -> StreamState:
        """Return the state before the first chunk, which was created at that time, or now."""
        return cls(_VERSION, int(time.time()) if created is None else created, 0, {})


_decoder = msgspec.msgpack.Decoder(StreamState)


def write_state(created: int, num_tokens: int, choices: dict[int, ChoiceState]) -> str:
    if len(choices) > _MAX_CHOICES:
        raise RequestError(
            f"the stream has more than {_MAX_CHOICES} choices", path=("generate_chunk", "choices")
        )
    state = StreamState(_VERSION, created, num_tokens, choices)
    return base64.b64encode(msgspec.msgpack.encode(state)).decode("ascii")


def read_state(text: str) -> StreamState:
    """Return a state that came back. Raise a `RequestError` if it was not written here."""
    try:
        state = _decoder.decode(base64.b64decode(text, validate=True))
        for choice in state.choices.values():
            choice.text.check()
    except (ValueError, msgspec.MsgspecError, RecursionError, RequestError) as error:
        raise _make_state_error() from error
    offsets = (choice.offset for choice in state.choices.values())
    counts = (state.created, state.num_completion_tokens, *state.choices, *offsets)
    is_whole = state.version == _VERSION and len(state.choices) <= _MAX_CHOICES
    if not is_whole or not all(0 <= count <= MAX_INTEGER for count in counts):
        raise _make_state_error()
    return state


def _make_state_error() -> RequestError:
    return RequestError("is not a state that this server has given", path=("stream_state",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The settings with which all choices of an answer are read."""

    tokenizer: Any
    params: SamplingParams  # with the texts and tokens that end an answer
    eos_token_ids: tuple[int, ...]
    format: AnswerFormat
    context: AnswerContext

    def read(self, choice: WireGenerateChoice, prompt_token_ids: tuple[int, ...]) -> Piece:
        """Return a whole choice."""
        return _ChoiceReader(self, prompt_token_ids).add(choice, is_whole=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedPieces:
    """A chunk of a stream."""

    created: int  # the same in all chunks
    num_tokens: int  # of all choices, so far
    pieces: list[Piece]
    state: str  # for the next chunk


def read_chunk(
    reading: Reading,
    chunk: WireGenerateResponse,
    given: str | None,
    prompt_token_ids: tuple[int, ...],
) -> StreamedPieces:
    """Read a chunk. `given` is the state from the chunk before, or `None` for the first chunk.

    A choice that has ended has no more pieces.
    """
    before = StreamState.start(chunk.created) if given is None else read_state(given)
    states = dict(before.choices)
    pieces: list[Piece] = []
    for index, choice in enumerate(chunk.choices):
        reader = _ChoiceReader(reading, prompt_token_ids, states.get(choice.index))
        if not reader.is_ended:
            with at("generate_chunk", "choices", index):
                pieces.append(reader.add(choice, is_whole=False))
        states[choice.index] = reader.save()
    num_new = sum(len(choice.token_ids or ()) for choice in chunk.choices)
    num_tokens = before.num_completion_tokens + num_new
    return StreamedPieces(
        created=before.created,
        num_tokens=num_tokens,
        pieces=pieces,
        state=write_state(before.created, num_tokens, states),
    )


class _ChoiceReader:
    """A reader of one choice, from its beginning or from a saved state."""

    def __init__(
        self, reading: Reading, prompt_token_ids: tuple[int, ...], state: ChoiceState | None = None
    ) -> None:
        self._text = TextReader(
            reading.tokenizer,
            reading.params,
            prompt_token_ids=prompt_token_ids,
            state=None if state is None else state.text,
            eos_token_ids=reading.eos_token_ids,
        )
        self._answer = (
            reading.format.start(reading.context) if state is None else _resume(reading, state)
        )
        self._offset = 0 if state is None else state.offset
        self._is_first = state is None

    @property
    def is_ended(self) -> bool:
        return self._text.is_ended

    def add(self, choice: WireGenerateChoice, *, is_whole: bool) -> Piece:
        """Return the piece for new tokens. With `is_whole`, no more tokens follow in any case."""
        finish_reason = choice.finish_reason or ("abort" if is_whole else None)
        given = choice.stop_reason
        stop_reason = None if isinstance(given, msgspec.UnsetType) else given
        token_ids = tuple(choice.token_ids or ())
        text = self._text.add(
            token_ids,
            finish_reason=finish_reason,
            stop_reason=UNKNOWN if given is msgspec.UNSET else stop_reason,
        )
        answer = read_piece(self._answer, text, is_last=self._text.is_ended)
        logprobs = _read_logprobs(choice)
        offset = self._offset
        self._offset += count_characters(logprobs)
        stop_string = self._text.stop_string
        return Piece(
            index=choice.index,
            is_first=self._is_first,
            answer=answer,
            num_tool_calls=self._answer.num_tool_calls,
            token_ids=token_ids,
            finish_reason=finish_reason if stop_string is None else "stop",
            stop_reason=stop_reason if stop_string is None else stop_string,
            logprobs=logprobs,
            offset=offset,
        )

    def save(self) -> ChoiceState:
        return ChoiceState(self._text.save(), self._answer.state, self._offset)


def _resume(reading: Reading, state: ChoiceState) -> AnswerReader:
    with at("stream_state"):
        return reading.format.resume(reading.context, state.answer)


def _read_logprobs(choice: WireGenerateChoice) -> ChatLogprobs | None:
    if choice.logprobs is None or choice.logprobs.get("content") is None:
        return None
    return read_scores(choice.logprobs, ChatLogprobs, "logprobs")


def read_scores(value: Any, kind: type[_Checked], field: str) -> _Checked:
    """Return log-probabilities that another server has made. Errors name the field as a whole."""
    try:
        return check(value, kind)
    except (RequestError, RecursionError) as error:
        raise RequestError(str(error), path=(field,)) from error
