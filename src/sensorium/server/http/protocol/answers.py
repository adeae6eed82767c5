"""What the routes for text answer: OpenAI's shapes, with this field's extras where they were asked
for. What is `UNSET` is not sent.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from sensorium.server.http.protocol.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
)

TokenIds = tuple[int, ...]


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class FunctionCall(Struct, frozen=True, kw_only=True):
    """`arguments`: the text of a JSON object, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class ChatAnswerMessage(Struct, frozen=True, kw_only=True):
    """`content` is null where there is only reasoning, or calls of tools."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    sensorium_trace: Any | UnsetType = UNSET


class FunctionCallDelta(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallChunk(Struct, frozen=True, kw_only=True):
    """A piece of the n-th call: its id, type and name come with the first one."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCallDelta


class ChatDelta(Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    prompt_token_ids: TokenIds | UnsetType = UNSET
    sensorium_trace: Any | UnsetType = UNSET


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """In chunks, too: there `finish_reason` is null until the last."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """In chunks, too: there `usage` is where it was asked for."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    sensorium_trace: Any | UnsetType = UNSET


class ErrorBody(Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None
    missing: list[str] | UnsetType = UNSET


class ErrorResponse(Struct, frozen=True, kw_only=True):
    error: ErrorBody


class ModelCard(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "sensorium"
    root: str
    parent: None = None
    max_model_len: int | None = None
    modalities: list[str]  # what a prompt may have: text, and kinds of media
    switched_off: dict[str, str] = {}  # kinds of media that can't be used here -> the reasons


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
