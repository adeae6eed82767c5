"""`/v1/chat/completions`: a conversation in, an answer out."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from sensorium.engine.inputs.chat_batch import Chat
from sensorium.render.answers.answer import AnswerDelta
from sensorium.render.answers.reader import AnswerReader
from sensorium.render.chat_options import ChatOptions
from sensorium.server.http.calls import (
    Call,
    Context,
    Work,
    get_finish_reason,
    get_prompt_fields,
    receive_call,
)
from sensorium.server.http.connections.disconnect import run_until_disconnect
from sensorium.server.http.errors import ApiError, FailureLog
from sensorium.server.http.openai.chat_answers import (
    ChatAnswers,
    get_chat_finish_reason,
    make_chat_answers,
    read_piece,
)
from sensorium.server.http.openai.logprobs import make_chat_logprobs, make_prompt_logprobs
from sensorium.server.http.openai.sampling import make_chat_params
from sensorium.server.http.openai.structured import find_constraint_path
from sensorium.server.http.openai.usage import make_usage
from sensorium.server.http.protocol.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
)
from sensorium.server.http.protocol.chat import ChatCompletionRequest
from sensorium.server.http.streaming.sse import EventStream
from sensorium.server.http.streaming.streaming import SseChunks
from sensorium.server.http.wire_paths import WirePaths, make_chat_paths
from sensorium.types.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput


async def answer_chat(http_request: Request, context: Context, failures: FailureLog) -> Response:
    def prepare(request: ChatCompletionRequest) -> Work:
        answers = make_chat_answers(context.answers, request)
        params = answers.make_params(make_chat_params(request))
        return [make_chat(request, answers, is_trusted=is_trusted)], params

    is_trusted = context.options.trust_request_chat_template
    call = await receive_call(
        http_request,
        context,
        ChatCompletionRequest,
        prepare,
        id_prefix="chatcmpl",
        make_paths=find_chat_paths,
    )
    answers = make_chat_answers(context.answers, call.request)
    if call.request.stream:
        frames = SseChunks(call, _ChatChunks(call, answers)).run()
        return EventStream(frames, make_error_body=failures.make_reporter(http_request))
    (output,) = await run_until_disconnect(http_request.receive, call.generation.finish())
    answer = _make_answer(call, answers, output)
    return Response(msgspec.json.encode(answer), media_type="application/json")


def find_chat_paths(request: ChatCompletionRequest) -> WirePaths:
    """Return where the fields stand that errors of the engine are about."""
    return make_chat_paths(request.messages, find_constraint_path(request))


def make_chat(
    request: ChatCompletionRequest, answers: ChatAnswers | None = None, *, is_trusted: bool
) -> Chat:
    """`answers`: where somebody will answer it. `is_trusted`: whether it may bring a template."""
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
    return Chat(
        messages=request.messages,
        options=ChatOptions(**options),
        fields=fields,
        adapt_params=None if answers is None else answers.adapt_params,
    )


def _make_answer(
    call: Call[ChatCompletionRequest], answers: ChatAnswers, output: RequestOutput
) -> ChatCompletion:
    has_ids = bool(call.request.return_token_ids)
    prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs)
    return ChatCompletion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[_make_choice(call, answers, output, entry) for entry in output.outputs],
        usage=make_usage([output]),
        prompt_logprobs=UNSET if prompt_logprobs is None else prompt_logprobs,
        prompt_token_ids=output.prompt_token_ids if has_ids else UNSET,
        sensorium_trace=call.make_trace() if call.has_trace else UNSET,
    )


def _make_choice(
    call: Call[ChatCompletionRequest],
    answers: ChatAnswers,
    output: RequestOutput,
    entry: CompletionOutput,
) -> ChatChoice:
    answer = answers.read(output.prompt_token_ids, entry.text)
    reason = get_finish_reason(output, entry.index)
    return ChatChoice(
        index=entry.index,
        message=answers.make_message(answer),
        logprobs=make_chat_logprobs(
            entry.token_ids, entry.logprobs, num_top=call.generation.params.logprobs or 0
        ),
        finish_reason=get_chat_finish_reason(reason, len(answer.tool_calls)),
        stop_reason=entry.stop_reason,
        token_ids=entry.token_ids if call.request.return_token_ids else UNSET,
    )


class _ChatChunks:
    """The first chunk of each choice has its role."""

    def __init__(self, call: Call[ChatCompletionRequest], answers: ChatAnswers) -> None:
        self._call = call
        self._answers = answers
        self._readers: dict[int, AnswerReader] = {}  # by choice
        self._has_ids = bool(call.request.return_token_ids)
        self._num_top = call.generation.params.logprobs or 0
        self._is_begun = False

    def make_chunks(self, prompt_index: int, delta: RequestDelta) -> list[ChatCompletionChunk]:
        del prompt_index
        chunks = [] if self._is_begun else self._make_first_chunks(delta)
        self._is_begun = True
        for entry in delta.deltas:
            if entry.index not in self._readers:
                self._readers[entry.index] = self._answers.start(delta.prompt_token_ids)
            chunks += self._read(entry)
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

    def _read(self, entry: CompletionDelta) -> list[ChatCompletionChunk]:
        """Text may lag behind its tokens, and what it means behind the text: then there is nothing
        to tell, unless tokens count.
        """
        is_last = entry.finish_reason is not None
        answer = read_piece(self._readers[entry.index], entry.text, is_last=is_last)
        has_tokens = bool((entry.logprobs is not None or self._has_ids) and entry.token_ids)
        if is_last or has_tokens or self._answers.is_news(answer):
            return [self._make_chunk(entry, answer)]
        return []

    def _make_chunk(self, entry: CompletionDelta, answer: AnswerDelta) -> ChatCompletionChunk:
        reason = None
        if entry.finish_reason is not None:
            num_calls = self._readers[entry.index].num_tool_calls
            reason = get_chat_finish_reason(str(entry.finish_reason), num_calls)
        choice = ChatChunkChoice(
            index=entry.index,
            delta=self._answers.make_delta(answer),
            logprobs=make_chat_logprobs(entry.token_ids, entry.logprobs, num_top=self._num_top),
            finish_reason=reason,
            stop_reason=UNSET if reason is None else entry.stop_reason,
            token_ids=entry.token_ids if self._has_ids else UNSET,
        )
        return self._wrap(choice)

    def _wrap(self, choice: ChatChunkChoice) -> ChatCompletionChunk:
        return msgspec.structs.replace(self.make_empty_chunk(), choices=[choice])
