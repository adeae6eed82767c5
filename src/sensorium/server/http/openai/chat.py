"""The route `/v1/chat/completions`, which answers a conversation, with tools and reasoning."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from sensorium.engine.inputs.renderer import Chat
from sensorium.render.answers.answer import AnswerContext, AnswerDelta, ToolCallDelta
from sensorium.render.answers.format import AnswerFormat
from sensorium.render.answers.reader import AnswerReader
from sensorium.render.answers.tools import parse_tool_choice, parse_tools
from sensorium.render.messages import ChatOptions
from sensorium.server.http.calls import (
    Call,
    Context,
    Work,
    check_takes_prompts,
    get_prompt_fields,
    start_call,
)
from sensorium.server.http.choices import Piece, make_piece, make_prompt_logprobs
from sensorium.server.http.errors import ApiError, WirePaths
from sensorium.server.http.openai.params import find_constraint_path, make_chat_params
from sensorium.server.http.protocol import answers as wire
from sensorium.server.http.protocol.requests import ChatCompletionRequest
from sensorium.server.http.streaming import answer_call
from sensorium.server.http.usage import make_usage
from sensorium.types.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput
from sensorium.types.sampling import SamplingParams

logger = logging.getLogger(__name__)


async def create_chat_completion(http_request: Request, context: Context) -> Response:
    check_takes_prompts(context)
    call = await start_call(
        http_request,
        context,
        ChatCompletionRequest,
        lambda request: prepare_chat(request, context),
        id_prefix="chatcmpl",
        find_paths=find_chat_paths,
    )
    return await answer_call(http_request, call, _ChatMaker(call))


def prepare_chat(request: ChatCompletionRequest, context: Context) -> Work:
    """Return the conversation and the sampling parameters of a chat request, or raise an error."""
    answers = make_chat_answers(context.answers, request)
    params = answers.make_params(make_chat_params(request))
    is_trusted = context.options.trust_request_chat_template
    return [make_chat(request, answers, is_trusted=is_trusted)], params


def find_chat_paths(request: ChatCompletionRequest) -> WirePaths:
    """Return the translation of field names in the engine's errors to this request's fields."""
    is_newer = request.max_completion_tokens is not None
    fields = {"max_tokens": ("max_completion_tokens",)} if is_newer else {}
    return WirePaths(input=("messages",), structured=find_constraint_path(request), fields=fields)


def make_chat(
    request: ChatCompletionRequest, answers: ChatAnswers | None = None, *, is_trusted: bool
) -> Chat:
    """Return the conversation of a chat request in the form that the engine takes.

    `answers` is `None` if the conversation is only tokenized. Raise an `ApiError` if the request
    has a chat template of its own and `is_trusted` is false.
    """
    if request.chat_template is not None and not is_trusted:
        raise ApiError(
            "chat_template is not allowed, because this server was not started with "
            "--trust-request-chat-template",
            param="chat_template",
        )
    is_continued = bool(request.continue_final_message)
    begins = request.add_generation_prompt
    options = ChatOptions(
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs or {},
        add_generation_prompt=not is_continued if begins is None else begins,
        continue_final_message=is_continued,
        tools=request.tools or None,
    )
    return Chat(
        messages=request.messages,
        options=options,
        fields=get_prompt_fields(request),
        adapt_params=None if answers is None else answers.adapt_params,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswers:
    """The way in which the answers to one chat request are constrained, read and sent."""

    form: AnswerFormat
    context: AnswerContext
    has_reasoning: bool  # reasoning is sent; otherwise it is read and left out
    has_ids: bool  # choices include their token ids

    def make_params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the special tokens that mark tool calls and reasoning.

        Raise an `ApiError` if the request requires a tool call and also constrains the answer.
        """
        if self.context.demands_call and params.structured_outputs is not None:
            raise ApiError(
                "tool_choice requires a tool call, so the answer can't have another constraint "
                "such as response_format",
                param="tool_choice",
            )
        return replace(params, kept_special_token_ids=self.form.kept_special_token_ids)

    def adapt_params(self, prompt: str | Sequence[int], params: SamplingParams) -> SamplingParams:
        """Return the sampling parameters with a constraint that fits the rendered prompt.

        If the request requires a tool call, the answer must be one. If the prompt ends inside
        reasoning, the client's own constraint applies only after the reasoning.
        """
        wanted = params.structured_outputs
        context = self.get_context(prompt)
        if context.demands_call:
            constraint = self.form.make_constraint(context)
        elif wanted is not None and context.starts_in_reasoning:
            constraint = self.form.make_constraint_after_reasoning(wanted)
        else:
            return params
        return replace(params, structured_outputs=constraint)

    def get_context(self, prompt: str | Sequence[int]) -> AnswerContext:
        """Return how to read an answer to this prompt, which may end inside reasoning."""
        is_open = self.form.opens_reasoning(prompt)
        return msgspec.structs.replace(self.context, starts_in_reasoning=is_open)

    def make_choice(self, piece: Piece) -> wire.ChatChoice:
        answer = piece.answer
        reasoning = answer.reasoning if self.has_reasoning else ""
        is_other = bool(answer.reasoning or answer.tool_calls)
        message = wire.ChatAnswerMessage(
            content=None if is_other and not answer.content else answer.content,
            reasoning_content=reasoning or UNSET,
            tool_calls=[_make_call(call) for call in answer.tool_calls] or UNSET,
        )
        return wire.ChatChoice(
            index=piece.index,
            message=message,
            logprobs=piece.logprobs,
            finish_reason=_get_finish_reason(piece) or "abort",
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if self.has_ids else UNSET,
        )

    def make_chunk_choice(self, piece: Piece, *, has_role: bool = False) -> wire.ChatChunkChoice:
        """Return the choice of a chunk; only the first chunk of a choice needs `has_role`."""
        answer = piece.answer
        reasoning = answer.reasoning if self.has_reasoning else ""
        is_other = bool(reasoning or answer.tool_calls)
        delta = wire.ChatDelta(
            role="assistant" if has_role else UNSET,
            content=UNSET if is_other and not answer.content else answer.content,
            reasoning_content=reasoning or UNSET,
            tool_calls=[_make_call_chunk(call) for call in answer.tool_calls] or UNSET,
        )
        return wire.ChatChunkChoice(
            index=piece.index,
            delta=delta,
            logprobs=piece.logprobs,
            finish_reason=_get_finish_reason(piece),
            stop_reason=UNSET if piece.finish_reason is None else piece.stop_reason,
            token_ids=piece.token_ids if self.has_ids else UNSET,
        )

    def is_shown(self, piece: Piece) -> bool:
        """Return whether a chunk is sent for a new part of a completion: not if the part is empty.

        A part can be empty because text comes later than its tokens, and tool calls and reasoning
        are found later than their text.
        """
        answer = piece.answer
        has_tokens = bool(piece.token_ids) and (piece.logprobs is not None or self.has_ids)
        has_reasoning = bool(answer.reasoning) and self.has_reasoning
        has_text = has_reasoning or bool(answer.content or answer.tool_calls)
        return piece.finish_reason is not None or has_tokens or has_text


def make_chat_answers(form: AnswerFormat, request: ChatCompletionRequest) -> ChatAnswers:
    """Return how the answers to a chat request are constrained, read and sent.

    Raise a `RequestError` if the request's tools or its `tool_choice` are not valid.
    """
    tools = parse_tools(request.tools)
    context = AnswerContext(
        tools=tools,
        tool_choice=parse_tool_choice(request.tool_choice, tools),
        parallel_tool_calls=request.parallel_tool_calls is not False,
    )
    if context.reads_calls and not form.shows_tools:
        _warn_of_hidden_tools()
    return ChatAnswers(
        form=form,
        context=context,
        has_reasoning=request.include_reasoning is not False,
        has_ids=bool(request.return_token_ids),
    )


def read_piece(reader: AnswerReader, text: str, *, is_last: bool) -> AnswerDelta:
    """Read new text of a completion, and return its content, reasoning and tool calls.

    The reader holds text back as long as it may be the beginning of a tag, unless `is_last`.
    """
    delta = reader.add(text)
    if not is_last:
        return delta
    rest = reader.finish()
    calls = {call.index: call for call in delta.tool_calls}
    for call in rest.tool_calls:
        before = calls.get(call.index)
        arguments = ("" if before is None else before.arguments) + call.arguments
        calls[call.index] = msgspec.structs.replace(before or call, arguments=arguments)
    return AnswerDelta(
        reasoning=delta.reasoning + rest.reasoning,
        content=delta.content + rest.content,
        tool_calls=tuple(calls.values()),
    )


class _ChatMaker:
    """A builder of the chat response to one client's request, whole or in chunks of a stream."""

    def __init__(self, call: Call[ChatCompletionRequest]) -> None:
        self._call = call
        self._answers = make_chat_answers(call.context.answers, call.request)
        self._readers: dict[int, AnswerReader] = {}  # index of a choice -> its reader
        self._is_begun = False

    def make_answer(self, outputs: Sequence[RequestOutput]) -> wire.ChatCompletion:
        call = self._call
        (output,) = outputs
        prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs)
        pieces = [self._read(entry, output.prompt_token_ids) for entry in output.outputs]
        return wire.ChatCompletion(
            id=call.id,
            created=call.created,
            model=call.model,
            choices=[self._answers.make_choice(piece) for piece in pieces],
            usage=make_usage(outputs),
            prompt_logprobs=UNSET if prompt_logprobs is None else prompt_logprobs,
            prompt_token_ids=output.prompt_token_ids if self._answers.has_ids else UNSET,
            sensorium_trace=call.get_trace(),
        )

    def make_chunks(self, _: int, delta: RequestDelta) -> list[wire.ChatCompletionChunk]:
        """Return the chunks for new output; at first also one with the role for each choice."""
        chunks = [] if self._is_begun else self._make_first_chunks(delta)
        self._is_begun = True
        for entry in delta.deltas:
            piece = self._read(entry, delta.prompt_token_ids)
            if self._answers.is_shown(piece):
                chunks.append(self._wrap(self._answers.make_chunk_choice(piece)))
        return chunks

    def make_empty_chunk(self) -> wire.ChatCompletionChunk:
        call = self._call
        return wire.ChatCompletionChunk(
            id=call.id, created=call.created, model=call.model, choices=[]
        )

    def _make_first_chunks(self, delta: RequestDelta) -> list[wire.ChatCompletionChunk]:
        role = wire.ChatDelta(role="assistant", content="")
        indices = range(self._call.params.n)
        chunks = [self._wrap(wire.ChatChunkChoice(index=index, delta=role)) for index in indices]
        if self._answers.has_ids:
            chunks[0] = msgspec.structs.replace(chunks[0], prompt_token_ids=delta.prompt_token_ids)
        return chunks

    def _read(
        self, entry: CompletionOutput | CompletionDelta, prompt_token_ids: tuple[int, ...]
    ) -> Piece:
        if entry.index not in self._readers:
            context = self._answers.get_context(prompt_token_ids)
            self._readers[entry.index] = self._answers.form.start(context)
        reader = self._readers[entry.index]
        is_last = isinstance(entry, CompletionOutput) or entry.finish_reason is not None
        answer = read_piece(reader, entry.text, is_last=is_last)
        num_calls, num_top = reader.num_tool_calls, self._call.num_top
        return make_piece(entry, num_top=num_top, answer=answer, num_tool_calls=num_calls)

    def _wrap(self, choice: wire.ChatChunkChoice) -> wire.ChatCompletionChunk:
        return msgspec.structs.replace(self.make_empty_chunk(), choices=[choice])


def _get_finish_reason(piece: Piece) -> str | None:
    """Return the finish reason ("tool_calls" for "stop" after calls), or `None` before the end."""
    is_call = piece.finish_reason == "stop" and piece.num_tool_calls
    return "tool_calls" if is_call else piece.finish_reason


def _make_call(call: ToolCallDelta) -> wire.ToolCall:
    function = wire.FunctionCall(name=call.name or "", arguments=call.arguments)
    return wire.ToolCall(id=call.id or "", function=function)


def _make_call_chunk(call: ToolCallDelta) -> wire.ToolCallChunk:
    return wire.ToolCallChunk(
        index=call.index,
        id=UNSET if call.id is None else call.id,
        type=UNSET if call.id is None else "function",
        function=wire.FunctionCallDelta(
            name=UNSET if call.name is None else call.name, arguments=call.arguments
        ),
    )


@cache
def _warn_of_hidden_tools() -> None:
    """Log a warning that the model does not see the tools of requests, but only once."""
    logger.warning("the model can't use tools: its chat template does not show tools to it")
