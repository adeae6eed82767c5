"""What a chat's request and its answers have to do with tools and reasoning."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from msgspec import UNSET

from sensorium.render.answers.answer import AnswerContext, AnswerDelta, ToolCallDelta
from sensorium.render.answers.format import AnswerFormat
from sensorium.render.answers.reader import AnswerReader
from sensorium.render.answers.tools import parse_tool_choice, parse_tools
from sensorium.server.http.errors import ApiError
from sensorium.server.http.protocol.answers import (
    ChatAnswerMessage,
    ChatDelta,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallChunk,
)
from sensorium.server.http.protocol.chat import ChatCompletionRequest
from sensorium.types.sampling import SamplingParams

logger = logging.getLogger(__name__)
_warned: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswers:
    """Of one request. `has_reasoning`: it is a part of the answer; else it is read and left out."""

    form: AnswerFormat
    context: AnswerContext
    has_reasoning: bool

    def make_params(self, params: SamplingParams) -> SamplingParams:
        """Those with which the answer can be read."""
        if self.context.demands_call and params.structured_outputs is not None:
            raise ApiError(
                "tool_choice demands a call: it can't be had together with another format of the "
                "answer",
                param="tool_choice",
            )
        return replace(params, kept_special_token_ids=self.form.kept_special_token_ids)

    def adapt_params(self, prompt: str | Sequence[int], params: SamplingParams) -> SamplingParams:
        """What depends on the rendered prompt: whether it has opened reasoning. What the answer
        must look like holds from the end of that on.
        """
        wanted = params.structured_outputs
        context = self.get_context(prompt)
        if context.demands_call:
            return replace(params, structured_outputs=self.form.make_constraint(context))
        if wanted is None or not context.starts_in_reasoning:
            return params
        constraint = self.form.make_constraint_after_reasoning(wanted)
        return replace(params, structured_outputs=constraint)

    def start(self, prompt_token_ids: Sequence[int]) -> AnswerReader:
        return self.form.start(self.get_context(prompt_token_ids))

    def read(self, prompt_token_ids: Sequence[int], text: str) -> AnswerDelta:
        """The whole of it."""
        return read_piece(self.start(prompt_token_ids), text, is_last=True)

    def get_context(self, prompt: str | Sequence[int]) -> AnswerContext:
        is_open = self.form.opens_reasoning(prompt)
        return msgspec.structs.replace(self.context, starts_in_reasoning=is_open)

    def make_message(self, answer: AnswerDelta) -> ChatAnswerMessage:
        reasoning = answer.reasoning if self.has_reasoning else ""
        is_other = bool(answer.reasoning or answer.tool_calls)
        return ChatAnswerMessage(
            content=None if is_other and not answer.content else answer.content,
            reasoning_content=reasoning or UNSET,
            tool_calls=[_make_call(call) for call in answer.tool_calls] or UNSET,
        )

    def make_delta(self, answer: AnswerDelta) -> ChatDelta:
        reasoning = answer.reasoning if self.has_reasoning else ""
        is_other = bool(reasoning or answer.tool_calls)
        return ChatDelta(
            content=UNSET if is_other and not answer.content else answer.content,
            reasoning_content=reasoning or UNSET,
            tool_calls=[_make_call_chunk(call) for call in answer.tool_calls] or UNSET,
        )

    def is_news(self, answer: AnswerDelta) -> bool:
        reasoning = answer.reasoning if self.has_reasoning else ""
        return bool(reasoning or answer.content or answer.tool_calls)


def make_chat_answers(form: AnswerFormat, request: ChatCompletionRequest) -> ChatAnswers:
    """Raises a `RequestError` that names the field."""
    tools = parse_tools(request.tools)
    context = AnswerContext(
        tools=tools,
        tool_choice=parse_tool_choice(request.tool_choice, tools),
        parallel_tool_calls=request.parallel_tool_calls is not False,
    )
    if context.reads_calls and not form.shows_tools:
        _warn_once("the chat template does not show tools to the model: it can't know of them")
    return ChatAnswers(
        form=form, context=context, has_reasoning=request.include_reasoning is not False
    )


def read_piece(reader: AnswerReader, text: str, *, is_last: bool) -> AnswerDelta:
    """What the text brings and, if nothing follows it, what was held back."""
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


def get_chat_finish_reason(reason: str, num_tool_calls: int) -> str:
    """An answer that ended by itself ended in its calls."""
    return "tool_calls" if reason == "stop" and num_tool_calls else reason


def _make_call(call: ToolCallDelta) -> ToolCall:
    function = FunctionCall(name=call.name or "", arguments=call.arguments)
    return ToolCall(id=call.id or "", function=function)


def _make_call_chunk(call: ToolCallDelta) -> ToolCallChunk:
    is_first = call.id is not None
    return ToolCallChunk(
        index=call.index,
        id=call.id if call.id is not None else UNSET,
        type="function" if is_first else UNSET,
        function=FunctionCallDelta(
            name=call.name if call.name is not None else UNSET, arguments=call.arguments
        ),
    )


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
