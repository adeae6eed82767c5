"""`/v1/chat/completions`: a conversation in, an answer out."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from sensorium.engine.chat import Chat
from sensorium.render.chat_options import ChatOptions
from sensorium.server.http.calls import (
    Call,
    Context,
    Work,
    get_finish_reason,
    get_prompt_fields,
    receive_call,
)
from sensorium.server.http.disconnect import run_until_disconnect
from sensorium.server.http.errors import ApiError
from sensorium.server.http.failures import FailureLog
from sensorium.server.http.logprobs import make_chat_logprobs, make_prompt_logprobs
from sensorium.server.http.protocol.answers import (
    ChatAnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
)
from sensorium.server.http.protocol.chat import ChatCompletionRequest
from sensorium.server.http.sampling import make_chat_params
from sensorium.server.http.sse import EventStream
from sensorium.server.http.streaming import Frames
from sensorium.server.http.usage import make_usage
from sensorium.types.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput


async def answer_chat(http_request: Request, context: Context, failures: FailureLog) -> Response:
    def prepare(request: ChatCompletionRequest) -> Work:
        params = make_chat_params(request)
        return [make_chat(request, is_trusted=is_trusted)], params

    is_trusted = context.options.trust_request_chat_template
    call = await receive_call(
        http_request,
        context,
        ChatCompletionRequest,
        prepare,
        id_prefix="chatcmpl",
        field="messages",
    )
    if call.request.stream:
        frames = Frames(call, _ChatChunks(call)).run()
        return EventStream(frames, make_error_body=failures.make_reporter(http_request))
    (output,) = await run_until_disconnect(http_request.receive, call.generation.finish())
    answer = _make_answer(call, output)
    return Response(msgspec.json.encode(answer), media_type="application/json")


def make_chat(request: ChatCompletionRequest, *, is_trusted: bool) -> Chat:
    """`is_trusted`: whether it may bring a template of its own."""
    if request.chat_template is not None and not is_trusted:
        raise ApiError(
            "chat_template is refused: this server was not started with "
            "--trust-request-chat-template",
            param="chat_template",
        )
    is_continued = bool(request.continue_final_message)
    begins = request.add_generation_prompt
    options: dict[str, Any] = {
        "chat_template": request.chat_template,
        "chat_template_kwargs": request.chat_template_kwargs or {},
        "add_generation_prompt": not is_continued if begins is None else begins,
        "continue_final_message": is_continued,
        "tools": request.tools or None,
    }
    fields = get_prompt_fields(request)
    if request.add_special_tokens is not None:
        fields["add_special_tokens"] = request.add_special_tokens
    return Chat(messages=request.messages, options=ChatOptions(**options), fields=fields)


def _make_answer(call: Call[ChatCompletionRequest], output: RequestOutput) -> ChatCompletion:
    has_ids = bool(call.request.return_token_ids)
    prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs)
    return ChatCompletion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[_make_choice(call, output, entry) for entry in output.outputs],
        usage=make_usage([output]),
        prompt_logprobs=UNSET if prompt_logprobs is None else prompt_logprobs,
        prompt_token_ids=output.prompt_token_ids if has_ids else UNSET,
        sensorium_trace=call.make_trace() if call.has_trace else UNSET,
    )


def _make_choice(
    call: Call[ChatCompletionRequest], output: RequestOutput, entry: CompletionOutput
) -> ChatChoice:
    return ChatChoice(
        index=entry.index,
        message=ChatAnswerMessage(content=entry.text),
        logprobs=make_chat_logprobs(
            entry.token_ids, entry.logprobs, num_top=call.generation.params.logprobs or 0
        ),
        finish_reason=get_finish_reason(output, entry.index),
        stop_reason=entry.stop_reason,
        token_ids=entry.token_ids if call.request.return_token_ids else UNSET,
    )


class _ChatChunks:
    """The first chunk of each choice has its role."""

    def __init__(self, call: Call[ChatCompletionRequest]) -> None:
        self._call = call
        self._has_ids = bool(call.request.return_token_ids)
        self._num_top = call.generation.params.logprobs or 0
        self._is_begun = False

    def make_chunks(self, prompt_index: int, delta: RequestDelta) -> list[ChatCompletionChunk]:
        del prompt_index
        chunks = [] if self._is_begun else self._make_first_chunks(delta)
        self._is_begun = True
        chunks += [self._make_chunk(entry) for entry in delta.deltas if self._is_news(entry)]
        return chunks

    def make_empty_chunk(self) -> ChatCompletionChunk:
        call = self._call
        return ChatCompletionChunk(id=call.id, created=call.created, model=call.model, choices=[])

    def _make_first_chunks(self, delta: RequestDelta) -> list[ChatCompletionChunk]:
        role = ChatDelta(role="assistant", content="")
        chunks = [
            self._wrap(ChatChunkChoice(index=index, delta=role))
            for index in range(self._call.num_choices)
        ]
        if self._has_ids:
            chunks[0] = msgspec.structs.replace(chunks[0], prompt_token_ids=delta.prompt_token_ids)
        return chunks

    def _is_news(self, entry: CompletionDelta) -> bool:
        """Text may lag behind its tokens: then there is nothing to tell, unless tokens count."""
        has_tokens = entry.logprobs is not None or self._has_ids
        return bool(entry.text or entry.finish_reason or (has_tokens and entry.token_ids))

    def _make_chunk(self, entry: CompletionDelta) -> ChatCompletionChunk:
        is_last = entry.finish_reason is not None
        choice = ChatChunkChoice(
            index=entry.index,
            delta=ChatDelta(content=entry.text),
            logprobs=make_chat_logprobs(entry.token_ids, entry.logprobs, num_top=self._num_top),
            finish_reason=str(entry.finish_reason) if is_last else None,
            stop_reason=entry.stop_reason if is_last else UNSET,
            token_ids=entry.token_ids if self._has_ids else UNSET,
        )
        return self._wrap(choice)

    def _wrap(self, choice: ChatChunkChoice) -> ChatCompletionChunk:
        return msgspec.structs.replace(self.make_empty_chunk(), choices=[choice])
