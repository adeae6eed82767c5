"""`/v1/completions/derender`: generated tokens in, a completion out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec import UNSET

from sensorium.render.answers.answer import AnswerContext
from sensorium.render.answers.format import PLAIN
from sensorium.server.http.calls import Context
from sensorium.server.http.derender.choice import (
    ChoiceNews,
    ChoiceReader,
    Reading,
    check_num_tokens,
    convert,
    count_prompt_tokens,
    make_usage,
)
from sensorium.server.http.derender.stream import read_chunk
from sensorium.server.http.errors import ApiError
from sensorium.server.http.openai.sampling import make_completion_params
from sensorium.server.http.protocol.answers import Completion, CompletionChoice
from sensorium.server.http.protocol.derender import (
    CompletionOptions,
    DerenderCompletionRequest,
    DerenderedCompletionChunk,
    WireGenerateResponse,
)
from sensorium.server.http.protocol.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
)

_Entry = TypeVar("_Entry")
_RESPONSES, _CHUNK = "generate_responses", "generate_chunk"


def derender_completion(
    request: DerenderCompletionRequest, context: Context
) -> Completion | DerenderedCompletionChunk:
    """All of the completions, or with `stream` the next chunk of those of one prompt."""
    options = request.completion_request or CompletionOptions()
    if options.echo:
        raise ApiError(
            "completion_request.echo: the prompt's text is not known here",
            param="completion_request.echo",
        )
    derender = _CompletionDerender(request, options, context)
    return derender.make_chunk() if request.stream else derender.make_answer()


class _CompletionDerender:
    def __init__(
        self, request: DerenderCompletionRequest, options: CompletionOptions, context: Context
    ) -> None:
        self._request = request
        self._has_ids = bool(options.return_token_ids)
        self._name = context.options.model_names[0]
        self._reading = Reading(
            tokenizer=context.engine.tokenizer,
            eos_token_ids=context.engine.eos_token_ids,
            params=make_completion_params(options),
            format=PLAIN,
            context=AnswerContext(),
        )

    def make_answer(self) -> Completion:
        """With a running index over the choices of all responses."""
        responses = self._request.generate_responses
        if responses is None:
            raise ApiError(f"{_RESPONSES} is missing", param=_RESPONSES)
        check_num_tokens(_RESPONSES, *responses)
        counts = _list_counts(self._request.prompt_tokens, len(responses))
        prompts = _list_prompts(self._request.prompt_token_ids, len(responses))
        choices: list[CompletionChoice] = []
        num_prompt_tokens = num_tokens = 0
        for number, response in enumerate(responses):
            path, prompt = f"{_RESPONSES}[{number}]", prompts[number]
            if not response.choices:
                raise ApiError(f"{path}.choices is empty", param=f"{path}.choices")
            num_prompt_tokens += count_prompt_tokens(response, counts[number], prompt)
            for index, choice in enumerate(response.choices):
                reader = ChoiceReader(self._reading, prompt_token_ids=prompt)
                news = reader.add(choice, f"{path}.choices[{index}]", is_whole=True)
                num_tokens += len(news.token_ids)
                choices.append(self._make_choice(news, len(choices), response, path))
        first = responses[0]
        return Completion(
            id=first.request_id or "",
            created=int(time.time()) if first.created is None else first.created,
            model=self._request.model or first.model or self._name,
            choices=choices,
            usage=make_usage(num_prompt_tokens, num_tokens, *responses),
        )

    def make_chunk(self) -> DerenderedCompletionChunk:
        response = self._request.generate_chunk
        if response is None:
            raise ApiError(f"{_CHUNK} is missing", param=_CHUNK)
        check_num_tokens(_CHUNK, response)
        (count,) = _list_counts(self._request.prompt_tokens, 1)
        (prompt,) = _list_prompts(self._request.prompt_token_ids, 1)
        streamed = read_chunk(self._reading, response, self._request.stream_state, prompt)
        usage = None
        if response.usage is not None:
            num_prompt_tokens = count_prompt_tokens(response, count, prompt)
            usage = make_usage(num_prompt_tokens, streamed.num_tokens, response)
        chunk = Completion(
            id=response.request_id or "",
            created=streamed.created,
            model=self._request.model or response.model or self._name,
            choices=[self._make_choice(news, news.index, None, "") for news in streamed.news],
            usage=UNSET if usage is None else usage,
        )
        return DerenderedCompletionChunk(chunk=chunk, stream_state=streamed.state)

    def _make_choice(
        self, news: ChoiceNews, index: int, response: WireGenerateResponse | None, path: str
    ) -> CompletionChoice:
        scores = None if response is None else response.prompt_logprobs
        path = f"{path}.prompt_logprobs"
        return CompletionChoice(
            index=index,
            text=news.answer.content,
            logprobs=_as_completion_logprobs(news.logprobs, news.offset),
            finish_reason=news.finish_reason,
            stop_reason=news.stop_reason,
            prompt_logprobs=UNSET if scores is None else convert(scores, PromptLogprobs, path),
            token_ids=news.token_ids if self._has_ids else UNSET,
        )


def _list_counts(given: list[int] | int | None, length: int) -> Sequence[int | None]:
    """One for each response; `None` where nothing is said."""
    if given is None:
        return [None] * length
    return _check_length([given] if isinstance(given, int) else given, length, "prompt_tokens")


def _list_prompts(given: Sequence[Any] | None, length: int) -> Sequence[tuple[int, ...]]:
    """That of a single response may come without a list around it."""
    if given is None:
        return [()] * length
    is_single = not any(isinstance(entry, list) for entry in given)
    prompts = [given] if is_single else given
    return [tuple(entry) for entry in _check_length(prompts, length, "prompt_token_ids")]


def _check_length(entries: Sequence[_Entry], length: int, name: str) -> Sequence[_Entry]:
    if len(entries) != length:
        raise ApiError(f"{name} has {len(entries)} entries for {length} response(s)", param=name)
    return entries


def _as_completion_logprobs(
    logprobs: ChatLogprobs | None, offset: int
) -> CompletionLogprobs | None:
    """The other API's shape of the same. Of different tokens with the same text the likelier one
    stands for both.
    """
    if logprobs is None:
        return None
    made = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for entry in logprobs.content:
        top: dict[str, float] = {}
        for other in entry.top_logprobs:
            top.setdefault(other.token, other.logprob)
        top.setdefault(entry.token, entry.logprob)
        made.tokens.append(entry.token)
        made.token_logprobs.append(entry.logprob)
        made.top_logprobs.append(top)
        made.text_offset.append(offset)
        offset += len(entry.token)
    return made
