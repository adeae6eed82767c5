"""The routes that derender: they turn responses of `/inference/v1/generate` into OpenAI's.

No model is needed, and nothing is kept between two requests: each response for a chunk has the
state of the stream, and the client sends it with the next chunk. The state is opaque to the client
(base64 of msgpack), is checked when it comes back, and does not grow with the answer's length.
Tokenizers are slow, so tokens are not turned into text on the event loop.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from sensorium.engine.outputs.text_reader import UNKNOWN, TextReader, TextState
from sensorium.render.answers.answer import AnswerContext
from sensorium.render.answers.format import PLAIN, AnswerFormat
from sensorium.server.http.bodies.reading import make_response, wants_msgpack
from sensorium.server.http.calls import Context, read_call
from sensorium.server.http.choices import (
    Piece,
    count_characters,
    make_completion_choice,
)
from sensorium.server.http.connections import run_in_thread
from sensorium.server.http.errors import ApiError
from sensorium.server.http.openai.chat import make_chat_answers, read_piece
from sensorium.server.http.openai.params import make_chat_params, make_completion_params
from sensorium.server.http.protocol import answers as wire
from sensorium.server.http.protocol.requests import MAX_INTEGER
from sensorium.server.http.protocol.tokens import (
    MAX_TOKENS,
    ChatOptions,
    CompletionOptions,
    DerenderChatRequest,
    DerenderCompletionRequest,
    WireGenerateChoice,
    WireGenerateResponse,
)
from sensorium.server.http.usage import count_usage, sum_details
from sensorium.types.checking import check
from sensorium.types.errors import RequestError, at, map_at
from sensorium.types.sampling import SamplingParams

_VERSION = 1
_MAX_CHOICES = 128
_RESPONSE, _RESPONSES, _CHUNK = "generate_response", "generate_responses", "generate_chunk"
_Wire = TypeVar("_Wire", bound=DerenderChatRequest | DerenderCompletionRequest)
_Checked = TypeVar("_Checked")
_Envelope = TypeVar("_Envelope", bound=Struct)
_Entry = TypeVar("_Entry")


async def derender_chat_completion(http_request: Request, context: Context) -> Response:
    return await _answer(http_request, context, DerenderChatRequest, _ChatDerender)


async def derender_completions(http_request: Request, context: Context) -> Response:
    return await _answer(http_request, context, DerenderCompletionRequest, _CompletionDerender)


async def _answer(
    http_request: Request,
    context: Context,
    kind: type[_Wire],
    start: Callable[[_Wire, Context], _Derender[_Wire]],
) -> Response:
    """Answer a request; its body may also be just a response of `/inference/v1/generate`."""

    def adapt(body: dict[str, Any]) -> dict[str, Any]:
        if "choices" not in body:
            return body
        return {_RESPONSE: body} if kind is DerenderChatRequest else {_RESPONSES: [body]}

    request, _ = await read_call(
        http_request, context, kind, lambda _: None, adapt=adapt, takes_msgpack=True
    )
    is_msgpack = wants_msgpack(http_request)

    def work() -> Response:
        derender = start(request, context)
        answer = derender.make_chunk() if request.stream else derender.make_answer()
        return make_response(answer, is_msgpack=is_msgpack)

    return await run_in_thread(work)


class ChoiceState(Struct, frozen=True, array_like=True):
    """The state of one choice of a stream, which the client keeps between two chunks."""

    text: TextState
    answer: Any = None  # of the reader that separates content, reasoning and tool calls
    offset: int = 0  # the `text_offset` of the next token, in characters


class StreamState(Struct, frozen=True, array_like=True):
    """The state of a derendered stream, which the client keeps between two chunks."""

    version: int  # of the format of this state
    created: int  # seconds since 1970; the same in all chunks
    num_completion_tokens: int  # of all choices, so far
    choices: dict[int, ChoiceState]


_decoder = msgspec.msgpack.Decoder(StreamState)


def write_state(created: int, num_tokens: int, choices: dict[int, ChoiceState]) -> str:
    """Return the state of a stream as text, or raise a `RequestError` for too many choices."""
    if len(choices) > _MAX_CHOICES:
        raise RequestError(f"a stream has at most {_MAX_CHOICES} choices", path=(_CHUNK, "choices"))
    state = StreamState(_VERSION, created, num_tokens, choices)
    return base64.b64encode(msgspec.msgpack.encode(state)).decode("ascii")


def read_state(text: str) -> StreamState:
    """Decode the state that a client has sent back; raise a `RequestError` if it is not valid."""
    try:
        state = _decoder.decode(base64.b64decode(text, validate=True))
        for choice in state.choices.values():
            choice.text.check()
        offsets = (choice.offset for choice in state.choices.values())
        counts = (state.created, state.num_completion_tokens, *state.choices, *offsets)
        is_whole = state.version == _VERSION and len(state.choices) <= _MAX_CHOICES
        if not is_whole or not all(0 <= count <= MAX_INTEGER for count in counts):
            raise ValueError("a version or a number is out of range")
    except (ValueError, msgspec.MsgspecError, RecursionError, RequestError) as error:
        raise RequestError(
            "must be the stream_state of the last response, unchanged", path=("stream_state",)
        ) from error
    return state


class _Derender(Generic[_Wire]):
    """A converter of generated token ids into OpenAI's response, or into one chunk of a stream."""

    # The type of a chunk, and the type of the answer that it is sent in.
    chunk_kinds: tuple[Callable[..., Struct], Callable[..., Struct]]

    def __init__(
        self,
        request: _Wire,
        context: Context,
        *,
        params: SamplingParams,  # with the texts and tokens that end an answer
        form: AnswerFormat,
        answer_context: AnswerContext,
    ) -> None:
        self.tokenizer = context.engine.tokenizer
        self.eos_token_ids = context.engine.eos_token_ids
        self.params = params
        self.form = form
        self.answer_context = answer_context
        self._request = request
        self._default_model = context.options.model_names[0]

    def make_answer(self) -> Struct:
        raise NotImplementedError

    def make_chunk_choice(self, piece: Piece) -> Struct:
        raise NotImplementedError

    def make_chunk(self) -> Struct:
        """Return the chunk for `generate_chunk`, and its state, without choices that had ended."""
        response = _get_given(self._request.generate_chunk, _CHUNK)
        given = self._request.stream_state
        (count,), (prompt,) = self._list_counts(1), self._list_prompts(1)
        if given is None:
            before = StreamState(_VERSION, _get_created(response), 0, {})
        else:
            before = read_state(given)
        states = dict(before.choices)
        pieces: list[Piece] = []
        for index, choice in enumerate(response.choices):
            reader = _ChoiceReader(self, prompt, states.get(choice.index))
            if not reader.is_ended:
                with at(_CHUNK, "choices", index):
                    pieces.append(reader.add(choice, is_whole=False))
            states[choice.index] = reader.save()
        num_tokens = before.num_completion_tokens + _count_tokens(response)
        usage: wire.Usage | UnsetType = UNSET
        if response.usage is not None:
            usage = _make_usage(_count_prompt_tokens(response, count, prompt), num_tokens, response)
        make_envelope, make_derendered = self.chunk_kinds
        chunk = self._make_envelope(
            make_envelope,
            response,
            created=before.created,
            choices=[self.make_chunk_choice(piece) for piece in pieces],
            usage=usage,
        )
        state = write_state(before.created, num_tokens, states)
        return make_derendered(chunk=chunk, stream_state=state)

    def _make_envelope(
        self, kind: Callable[..., _Envelope], response: WireGenerateResponse, **fields: Any
    ) -> _Envelope:
        model = self._request.model or response.model or self._default_model
        return kind(id=response.request_id or "", model=model, **fields)

    def _read_whole(
        self, response: WireGenerateResponse, prompt: tuple[int, ...]
    ) -> tuple[list[Piece], wire.PromptLogprobs | UnsetType]:
        """Return a response's completions, and the log-probabilities of its prompt or `UNSET`."""
        if not response.choices:
            raise RequestError("must not be empty", path=("choices",))
        with at("choices"):
            pieces = map_at(
                lambda choice: _ChoiceReader(self, prompt).add(choice, is_whole=True),
                response.choices,
            )
        scores = response.prompt_logprobs
        if scores is None:
            return pieces, UNSET
        return pieces, _read_scores(scores, wire.PromptLogprobs, "prompt_logprobs")

    def _list_counts(self, length: int) -> Sequence[int | None]:
        """Return the prompt lengths that the client sent for `length` responses, or `None`s."""
        given = self._request.prompt_tokens
        if given is None:
            return [None] * length
        return _check_length([given] if isinstance(given, int) else given, length, "prompt_tokens")

    def _list_prompts(self, length: int) -> Sequence[tuple[int, ...]]:
        """Return the prompts that the client sent for `length` responses, or empty ones."""
        given: Sequence[Any] | None = self._request.prompt_token_ids
        if given is None:
            return [()] * length
        num_lists = sum(isinstance(entry, list) for entry in given)
        if num_lists not in (0, len(given)):
            raise RequestError("must be all token ids, or all lists", path=("prompt_token_ids",))
        prompts = given if num_lists else [given]
        return [tuple(entry) for entry in _check_length(prompts, length, "prompt_token_ids")]


class _ChatDerender(_Derender[DerenderChatRequest]):
    chunk_kinds = (wire.ChatCompletionChunk, wire.DerenderedChatChunk)

    def __init__(self, request: DerenderChatRequest, context: Context) -> None:
        options = request.chat_request or ChatOptions()
        with _inside("chat_request"):
            self._answers = make_chat_answers(context.answers, options)
            params = self._answers.make_params(make_chat_params(options))
        super().__init__(
            request,
            context,
            params=params,
            form=context.answers,
            answer_context=self._answers.get_context(request.prompt_token_ids or ()),
        )

    def make_answer(self) -> wire.ChatCompletion:
        response = _get_given(self._request.generate_response, _RESPONSE)
        (count,), (prompt,) = self._list_counts(1), self._list_prompts(1)
        with at(_RESPONSE):
            pieces, prompt_logprobs = self._read_whole(response, prompt)
        num_prompt_tokens = _count_prompt_tokens(response, count, prompt)
        return self._make_envelope(
            wire.ChatCompletion,
            response,
            created=_get_created(response),
            choices=[self._answers.make_choice(piece) for piece in pieces],
            usage=_make_usage(num_prompt_tokens, _count_tokens(response), response),
            prompt_logprobs=prompt_logprobs,
        )

    def make_chunk_choice(self, piece: Piece) -> wire.ChatChunkChoice:
        return self._answers.make_chunk_choice(piece, has_role=piece.is_first)


class _CompletionDerender(_Derender[DerenderCompletionRequest]):
    chunk_kinds = (wire.Completion, wire.DerenderedCompletionChunk)

    def __init__(self, request: DerenderCompletionRequest, context: Context) -> None:
        options = request.completion_request or CompletionOptions()
        with _inside("completion_request"):
            if options.echo:
                raise RequestError(
                    "must not be true, because this route has no text of the prompt", path=("echo",)
                )
            params = make_completion_params(options)
        super().__init__(
            request, context, params=params, form=PLAIN, answer_context=AnswerContext()
        )
        self._has_ids = bool(options.return_token_ids)

    def make_answer(self) -> wire.Completion:
        """Return one response with the completions of all prompts, numbered from 0 on."""
        responses = self._request.generate_responses
        if responses is None:
            raise RequestError("is missing", path=(_RESPONSES,))
        _check_num_tokens(_RESPONSES, *responses)
        counts, prompts = self._list_counts(len(responses)), self._list_prompts(len(responses))
        choices: list[wire.CompletionChoice] = []
        for number, response in enumerate(responses):
            with at(_RESPONSES, number):
                pieces, prompt_logprobs = self._read_whole(response, prompts[number])
            choices += [
                make_completion_choice(
                    piece, index=index, has_ids=self._has_ids, prompt_logprobs=prompt_logprobs
                )
                for index, piece in enumerate(pieces, start=len(choices))
            ]
        num_prompt_tokens = sum(map(_count_prompt_tokens, responses, counts, prompts))
        return self._make_envelope(
            wire.Completion,
            responses[0],
            created=_get_created(responses[0]),
            choices=choices,
            usage=_make_usage(num_prompt_tokens, sum(map(_count_tokens, responses)), *responses),
        )

    def make_chunk_choice(self, piece: Piece) -> wire.CompletionChoice:
        return make_completion_choice(piece, index=piece.index, has_ids=self._has_ids)


@contextmanager
def _inside(field: str) -> Iterator[None]:
    """Put the name of a field before the paths in errors that are raised inside the block."""
    try:
        with at(field):
            yield
    except ApiError as error:
        error.param = field if error.param is None else f"{field}.{error.param}"
        raise


class _ChoiceReader:
    """A reader that turns the token ids of one choice into content, reasoning and tool calls.

    It begins with the first token, or continues from the `state` that an earlier reader has saved.
    The text of the first token may depend on the prompt.
    """

    def __init__(
        self, derender: _Derender[Any], prompt: tuple[int, ...], state: ChoiceState | None = None
    ) -> None:
        self._text = TextReader(
            derender.tokenizer,
            derender.params,
            prompt_token_ids=prompt,
            state=None if state is None else state.text,
            eos_token_ids=derender.eos_token_ids,
        )
        if state is None:
            self._answer = derender.form.start(derender.answer_context)
        else:
            with at("stream_state"):
                self._answer = derender.form.resume(derender.answer_context, state.answer)
        self._offset = 0 if state is None else state.offset
        self._is_first = state is None

    @property
    def is_ended(self) -> bool:
        return self._text.is_ended

    def add(self, choice: WireGenerateChoice, *, is_whole: bool) -> Piece:
        """Read new token ids, and return the part of the completion that they add.

        With `is_whole`, no more tokens follow: a choice without a finish reason counts as aborted.
        """
        finish_reason = choice.finish_reason or ("abort" if is_whole else None)
        given = choice.stop_reason
        stop_reason = None if isinstance(given, UnsetType) else given
        token_ids = tuple(choice.token_ids or ())
        text = self._text.add(
            token_ids,
            finish_reason=finish_reason,
            stop_reason=UNKNOWN if given is UNSET else stop_reason,
        )
        answer = read_piece(self._answer, text, is_last=self._text.is_ended)
        logprobs = None
        if choice.logprobs is not None and choice.logprobs.get("content") is not None:
            logprobs = _read_scores(choice.logprobs, wire.ChatLogprobs, "logprobs")
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


def _read_scores(value: Any, kind: type[_Checked], field: str) -> _Checked:
    """Return a client's log-probabilities as `kind`; a `RequestError` has the path `field`."""
    try:
        return check(value, kind)
    except (RequestError, RecursionError) as error:
        raise RequestError(str(error), path=(field,)) from error


def _get_given(response: WireGenerateResponse | None, field: str) -> WireGenerateResponse:
    if response is None:
        raise RequestError("is missing", path=(field,))
    _check_num_tokens(field, response)
    return response


def _check_num_tokens(field: str, *responses: WireGenerateResponse) -> None:
    num_tokens = sum(map(_count_tokens, responses))
    if num_tokens > MAX_TOKENS:
        message = f"has {num_tokens} tokens; at most {MAX_TOKENS} are allowed in one request"
        raise RequestError(message, path=(field,))


def _count_tokens(response: WireGenerateResponse) -> int:
    return sum(len(choice.token_ids or ()) for choice in response.choices)


def _get_created(response: WireGenerateResponse) -> int:
    return int(time.time()) if response.created is None else response.created


def _count_prompt_tokens(
    response: WireGenerateResponse, given: int | None, prompt: tuple[int, ...]
) -> int:
    """Return a prompt's length: `given`, or that in the response's usage, or that of `prompt`."""
    counted = None if response.usage is None else response.usage.prompt_tokens
    return next(count for count in (given, counted, len(prompt)) if count is not None)


def _make_usage(
    num_prompt_tokens: int, num_completion_tokens: int, *responses: WireGenerateResponse
) -> wire.Usage:
    """Return the token counts, with those details of the prompts that all of `responses` have."""
    details = sum_details([response.usage for response in responses])
    return count_usage(num_prompt_tokens, num_completion_tokens, details=details)


def _check_length(entries: Sequence[_Entry], length: int, name: str) -> Sequence[_Entry]:
    if len(entries) != length:
        raise RequestError(f"has {len(entries)} entries for {length} response(s)", path=(name,))
    return entries
