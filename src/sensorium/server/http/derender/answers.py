"""The routes that derender: they turn answers of `/inference/v1/generate` into OpenAI's answers.

No model is needed, and nothing is kept between two calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from sensorium.render.answers.answer import AnswerContext
from sensorium.render.answers.format import PLAIN
from sensorium.server.http.bodies.reading import make_response, wants_msgpack
from sensorium.server.http.calls import Context, read_call
from sensorium.server.http.choices import count_usage, make_completion_choice
from sensorium.server.http.connections.tasks import run_in_thread
from sensorium.server.http.derender.reading import Reading, read_chunk, read_scores
from sensorium.server.http.openai.chat import make_chat_answers
from sensorium.server.http.openai.params import make_chat_params, make_completion_params
from sensorium.server.http.protocol.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChoice,
    DerenderedChatChunk,
    DerenderedCompletionChunk,
    PromptLogprobs,
    Usage,
)
from sensorium.server.http.protocol.tokens import (
    MAX_TOKENS,
    ChatOptions,
    CompletionOptions,
    DerenderChatRequest,
    DerenderCompletionRequest,
    WireGenerateResponse,
)
from sensorium.types.errors import RequestError, at

_Wire = TypeVar("_Wire", bound=DerenderChatRequest | DerenderCompletionRequest)
_Entry = TypeVar("_Entry")
_RESPONSE, _RESPONSES, _CHUNK = "generate_response", "generate_responses", "generate_chunk"


async def derender_chat_completion(http_request: Request, context: Context) -> Response:
    return await _answer(
        http_request,
        context,
        DerenderChatRequest,
        lambda body: {_RESPONSE: body},
        lambda request: _ChatDerender(request, context),
    )


async def derender_completions(http_request: Request, context: Context) -> Response:
    return await _answer(
        http_request,
        context,
        DerenderCompletionRequest,
        lambda body: {_RESPONSES: [body]},
        lambda request: _CompletionDerender(request, context),
    )


async def _answer(
    http_request: Request,
    context: Context,
    kind: type[_Wire],
    wrap: Callable[[dict[str, Any]], dict[str, Any]],
    start: Callable[[_Wire], _ChatDerender | _CompletionDerender],
) -> Response:
    """Answer a request. If its body is only a generated answer, `wrap` makes a request of it."""

    def adapt(body: dict[str, Any]) -> dict[str, Any]:
        return wrap(body) if "choices" in body else body

    request, _ = await read_call(
        http_request, context, kind, lambda _: None, adapt=adapt, takes_msgpack=True
    )
    is_msgpack = wants_msgpack(http_request)

    def work() -> Response:
        derender = start(request)
        answer = derender.make_chunk() if request.stream else derender.make_answer()
        return make_response(answer, is_msgpack=is_msgpack)

    return await run_in_thread(work)


class _ChatDerender:
    """A maker of a chat's answer, or of a chunk of one, from generated tokens."""

    def __init__(self, request: DerenderChatRequest, context: Context) -> None:
        options = request.chat_request or ChatOptions()
        self._request = request
        self._context = context
        self._prompt_token_ids = tuple(request.prompt_token_ids or ())
        self._answers = make_chat_answers(context.answers, options)
        self._reading = Reading(
            tokenizer=context.engine.tokenizer,
            eos_token_ids=context.engine.eos_token_ids,
            params=self._answers.make_params(make_chat_params(options)),
            format=context.answers,
            context=self._answers.get_context(self._prompt_token_ids),
        )

    def make_answer(self) -> ChatCompletion:
        response = _get_given(self._request.generate_response, _RESPONSE)
        with at(_RESPONSE):
            _check_choices(response)
            pieces = []
            for index, choice in enumerate(response.choices):
                with at("choices", index):
                    pieces.append(self._reading.read(choice, self._prompt_token_ids))
            prompt_logprobs = _read_prompt_logprobs(response)
        num_tokens = sum(len(piece.token_ids) for piece in pieces)
        return ChatCompletion(
            id=response.request_id or "",
            created=int(time.time()) if response.created is None else response.created,
            model=_get_model(self._request, response, self._context),
            choices=[self._answers.make_choice(piece) for piece in pieces],
            usage=_make_usage(self._count_prompt(response), num_tokens, response),
            prompt_logprobs=prompt_logprobs,
        )

    def make_chunk(self) -> DerenderedChatChunk:
        response = _get_given(self._request.generate_chunk, _CHUNK)
        state = self._request.stream_state
        streamed = read_chunk(self._reading, response, state, self._prompt_token_ids)
        choices = [
            self._answers.make_chunk_choice(piece, has_role=piece.is_first)
            for piece in streamed.pieces
        ]
        usage: Usage | UnsetType = UNSET
        if response.usage is not None:
            usage = _make_usage(self._count_prompt(response), streamed.num_tokens, response)
        chunk = ChatCompletionChunk(
            id=response.request_id or "",
            created=streamed.created,
            model=_get_model(self._request, response, self._context),
            choices=choices,
            usage=usage,
        )
        return DerenderedChatChunk(chunk=chunk, stream_state=streamed.state)

    def _count_prompt(self, response: WireGenerateResponse) -> int:
        return _count_prompt_tokens(response, self._request.prompt_tokens, self._prompt_token_ids)


class _CompletionDerender:
    """A maker of completions of several prompts, or of a chunk of one, from generated tokens."""

    def __init__(self, request: DerenderCompletionRequest, context: Context) -> None:
        options = request.completion_request or CompletionOptions()
        if options.echo:
            path = ("completion_request", "echo")
            raise RequestError("can't be true: the text of the prompt is not known here", path=path)
        self._request = request
        self._context = context
        self._has_ids = bool(options.return_token_ids)
        self._reading = Reading(
            tokenizer=context.engine.tokenizer,
            eos_token_ids=context.engine.eos_token_ids,
            params=make_completion_params(options),
            format=PLAIN,
            context=AnswerContext(),
        )

    def make_answer(self) -> Completion:
        """Return all completions, with indices that run over the choices of all responses."""
        responses = self._request.generate_responses
        if responses is None:
            raise RequestError("is missing", path=(_RESPONSES,))
        _check_num_tokens(_RESPONSES, *responses)
        counts = _list_counts(self._request.prompt_tokens, len(responses))
        prompts = _list_prompts(self._request.prompt_token_ids, len(responses))
        choices: list[CompletionChoice] = []
        num_prompt_tokens = num_tokens = 0
        for number, response in enumerate(responses):
            num_prompt_tokens += _count_prompt_tokens(response, counts[number], prompts[number])
            with at(_RESPONSES, number):
                choices += self._read(response, prompts[number], len(choices))
            num_tokens += sum(len(choice.token_ids or ()) for choice in response.choices)
        first = responses[0]
        return Completion(
            id=first.request_id or "",
            created=int(time.time()) if first.created is None else first.created,
            model=_get_model(self._request, first, self._context),
            choices=choices,
            usage=_make_usage(num_prompt_tokens, num_tokens, *responses),
        )

    def make_chunk(self) -> DerenderedCompletionChunk:
        response = _get_given(self._request.generate_chunk, _CHUNK)
        (count,) = _list_counts(self._request.prompt_tokens, 1)
        (prompt,) = _list_prompts(self._request.prompt_token_ids, 1)
        streamed = read_chunk(self._reading, response, self._request.stream_state, prompt)
        usage: Usage | UnsetType = UNSET
        if response.usage is not None:
            num_prompt_tokens = _count_prompt_tokens(response, count, prompt)
            usage = _make_usage(num_prompt_tokens, streamed.num_tokens, response)
        chunk = Completion(
            id=response.request_id or "",
            created=streamed.created,
            model=_get_model(self._request, response, self._context),
            choices=[
                make_completion_choice(piece, index=piece.index, has_ids=self._has_ids)
                for piece in streamed.pieces
            ],
            usage=usage,
        )
        return DerenderedCompletionChunk(chunk=chunk, stream_state=streamed.state)

    def _read(
        self, response: WireGenerateResponse, prompt: tuple[int, ...], num_before: int
    ) -> list[CompletionChoice]:
        _check_choices(response)
        prompt_logprobs = _read_prompt_logprobs(response)
        choices = []
        for index, choice in enumerate(response.choices):
            with at("choices", index):
                piece = self._reading.read(choice, prompt)
            made = make_completion_choice(
                piece,
                index=num_before + index,
                has_ids=self._has_ids,
                prompt_logprobs=prompt_logprobs,
            )
            choices.append(made)
        return choices


def _get_given(response: WireGenerateResponse | None, field: str) -> WireGenerateResponse:
    if response is None:
        raise RequestError("is missing", path=(field,))
    _check_num_tokens(field, response)
    return response


def _check_num_tokens(field: str, *responses: WireGenerateResponse) -> None:
    num_tokens = sum(
        len(choice.token_ids or ()) for response in responses for choice in response.choices
    )
    if num_tokens > MAX_TOKENS:
        message = f"has {num_tokens} tokens; at most {MAX_TOKENS} are allowed in one call"
        raise RequestError(message, path=(field,))


def _check_choices(response: WireGenerateResponse) -> None:
    if not response.choices:
        raise RequestError("must not be empty", path=("choices",))


def _read_prompt_logprobs(response: WireGenerateResponse) -> PromptLogprobs | UnsetType:
    if response.prompt_logprobs is None:
        return UNSET
    return read_scores(response.prompt_logprobs, PromptLogprobs, "prompt_logprobs")


def _get_model(
    request: DerenderChatRequest | DerenderCompletionRequest,
    response: WireGenerateResponse,
    context: Context,
) -> str:
    return request.model or response.model or context.options.model_names[0]


def _count_prompt_tokens(
    response: WireGenerateResponse, given: int | None, prompt_token_ids: tuple[int, ...]
) -> int:
    """Return the caller's count, or else the answer's, or else the number of given tokens."""
    usage = response.usage
    counts = (given, None if usage is None else usage.prompt_tokens, len(prompt_token_ids))
    return next(count for count in counts if count is not None)


def _make_usage(
    num_prompt_tokens: int, num_completion_tokens: int, *responses: WireGenerateResponse
) -> Usage:
    """Return the usage, with the cached tokens if all answers have their number."""
    cached = [_get_num_cached(response) for response in responses]
    known = [count for count in cached if count is not None]
    is_known = bool(known) and len(known) == len(cached)
    num_cached = sum(known) if is_known else None
    return count_usage(num_prompt_tokens, num_completion_tokens, num_cached_tokens=num_cached)


def _get_num_cached(response: WireGenerateResponse) -> int | None:
    usage = response.usage
    details = None if usage is None else usage.prompt_tokens_details
    count = None if details is None else details.get("cached_tokens")
    return count if type(count) is int and 0 <= count < 2**53 else None


def _list_counts(given: list[int] | int | None, length: int) -> Sequence[int | None]:
    """Return one count for each response, `None` where none was given."""
    if given is None:
        return [None] * length
    return _check_length([given] if isinstance(given, int) else given, length, "prompt_tokens")


def _list_prompts(given: Sequence[Any] | None, length: int) -> Sequence[tuple[int, ...]]:
    """Return one prompt for each response. A single prompt may come without an outer list."""
    if given is None:
        return [()] * length
    num_lists = sum(isinstance(entry, list) for entry in given)
    if num_lists not in (0, len(given)):
        raise RequestError("must be tokens, or lists of tokens", path=("prompt_token_ids",))
    prompts = given if num_lists else [given]
    return [tuple(entry) for entry in _check_length(prompts, length, "prompt_token_ids")]


def _check_length(entries: Sequence[_Entry], length: int, name: str) -> Sequence[_Entry]:
    if len(entries) != length:
        raise RequestError(f"has {len(entries)} entries for {length} response(s)", path=(name,))
    return entries
