"""`/v1/chat/completions/derender`: generated tokens in, a chat's answer out."""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET

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
from sensorium.server.http.openai.chat_answers import get_chat_finish_reason, make_chat_answers
from sensorium.server.http.openai.sampling import make_chat_params
from sensorium.server.http.protocol.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
)
from sensorium.server.http.protocol.derender import (
    ChatOptions,
    DerenderChatRequest,
    DerenderedChatChunk,
    WireGenerateResponse,
)
from sensorium.server.http.protocol.logprobs import PromptLogprobs

_RESPONSE, _CHUNK = "generate_response", "generate_chunk"


def derender_chat(
    request: DerenderChatRequest, context: Context
) -> ChatCompletion | DerenderedChatChunk:
    """The whole of an answer, or with `stream` the next chunk of one."""
    name = _CHUNK if request.stream else _RESPONSE
    response: WireGenerateResponse | None = getattr(request, name)
    if response is None:
        raise ApiError(f"{name} is missing", param=name)
    check_num_tokens(name, response)
    options = request.chat_request or ChatOptions()
    derender = _ChatDerender(request, response, options, context)
    return derender.make_chunk() if request.stream else derender.make_answer()


class _ChatDerender:
    def __init__(
        self,
        request: DerenderChatRequest,
        response: WireGenerateResponse,
        options: ChatOptions,
        context: Context,
    ) -> None:
        self._request = request
        self._response = response
        self._has_ids = bool(options.return_token_ids)
        self._model = request.model or response.model or context.options.model_names[0]
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
        response = self._response
        if not response.choices:
            raise ApiError(f"{_RESPONSE}.choices is empty", param=f"{_RESPONSE}.choices")
        news = [
            ChoiceReader(self._reading, prompt_token_ids=self._prompt_token_ids).add(
                choice, f"{_RESPONSE}.choices[{index}]", is_whole=True
            )
            for index, choice in enumerate(response.choices)
        ]
        num_tokens = sum(len(entry.token_ids) for entry in news)
        scores = response.prompt_logprobs
        path = f"{_RESPONSE}.prompt_logprobs"
        return ChatCompletion(
            id=response.request_id or "",
            created=int(time.time()) if response.created is None else response.created,
            model=self._model,
            choices=[self._make_choice(entry) for entry in news],
            usage=make_usage(self._count_prompt(), num_tokens, response),
            prompt_logprobs=UNSET if scores is None else convert(scores, PromptLogprobs, path),
        )

    def make_chunk(self) -> DerenderedChatChunk:
        response, state = self._response, self._request.stream_state
        streamed = read_chunk(self._reading, response, state, self._prompt_token_ids)
        usage = None
        if response.usage is not None:
            usage = make_usage(self._count_prompt(), streamed.num_tokens, response)
        chunk = ChatCompletionChunk(
            id=response.request_id or "",
            created=streamed.created,
            model=self._model,
            choices=[self._make_chunk_choice(news) for news in streamed.news],
            usage=UNSET if usage is None else usage,
        )
        return DerenderedChatChunk(chunk=chunk, stream_state=streamed.state)

    def _count_prompt(self) -> int:
        return count_prompt_tokens(
            self._response, self._request.prompt_tokens, self._prompt_token_ids
        )

    def _make_choice(self, news: ChoiceNews) -> ChatChoice:
        return ChatChoice(
            index=news.index,
            message=self._answers.make_message(news.answer),
            logprobs=news.logprobs,
            finish_reason=get_chat_finish_reason(
                news.finish_reason or "abort", news.num_tool_calls
            ),
            stop_reason=news.stop_reason,
            token_ids=news.token_ids if self._has_ids else UNSET,
        )

    def _make_chunk_choice(self, news: ChoiceNews) -> ChatChunkChoice:
        """The first news of each choice have its role."""
        is_last = news.finish_reason is not None
        delta = self._answers.make_delta(news.answer)
        if news.is_first:
            delta = msgspec.structs.replace(delta, role="assistant")
        reason = news.finish_reason
        return ChatChunkChoice(
            index=news.index,
            delta=delta,
            logprobs=news.logprobs,
            finish_reason=None
            if reason is None
            else get_chat_finish_reason(reason, news.num_tool_calls),
            stop_reason=news.stop_reason if is_last else UNSET,
            token_ids=news.token_ids if self._has_ids else UNSET,
        )
