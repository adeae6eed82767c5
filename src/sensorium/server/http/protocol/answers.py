"""The shapes of answers: OpenAI's, with fields that similar servers add if a request asks.

A field that is `UNSET` is not sent.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

TokenIds = tuple[int, ...]


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """Lists with one entry per token. `None` stands for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


# For each token of the prompt: token id in decimal -> its log-probability.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class FunctionCall(Struct, frozen=True, kw_only=True):
    name: str
    arguments: str  # the text of a JSON object, as the model wrote it


class ToolCall(Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class ChatAnswerMessage(Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None  # null if there are only reasoning or calls of tools
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


# Each struct below lists all of its fields, because answers have them in this order.
class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | UnsetType | None = None  # the stop string or token that ended it
    token_ids: TokenIds | UnsetType = UNSET


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """A choice of a whole answer or of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None  # in a stream: null until the last chunk
    stop_reason: str | int | UnsetType | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class GenerateChoice(Struct, frozen=True, kw_only=True):
    """A choice of a whole answer or of a chunk, which has the new tokens only."""

    index: int
    token_ids: TokenIds
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = None
    logprobs: ChatLogprobs | None = None


class FunctionCallDelta(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallChunk(Struct, frozen=True, kw_only=True):
    """A piece of the n-th call. The first piece has its id, type and name."""

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


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int  # seconds since 1970
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    sensorium_trace: Any | UnsetType = UNSET


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET  # only if it was asked for
    system_fingerprint: str | None = None
    prompt_token_ids: TokenIds | UnsetType = UNSET
    sensorium_trace: Any | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """A whole answer or a chunk."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    sensorium_trace: Any | UnsetType = UNSET


class GenerateResponse(Struct, frozen=True, kw_only=True):
    """A whole answer or a chunk."""

    request_id: str
    model: str
    created: int
    choices: list[GenerateChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    sensorium_trace: Any | UnsetType = UNSET


Envelope = ChatCompletion | ChatCompletionChunk | Completion | GenerateResponse


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
    modalities: list[str]  # of a prompt: text, and kinds of media
    switched_off: dict[str, str] = {}  # kind of media -> why it can't be used


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int | None
    tokens: TokenIds
    token_strs: list[str] | None = None  # the vocabulary's own names, if they were asked for


class DetokenizeResponse(Struct, frozen=True, kw_only=True):
    prompt: str


class Placeholder(Struct, frozen=True, kw_only=True):
    """The place of an item in the prompt."""

    offset: int
    length: int
    # Lengths of runs of positions without and with an embedding, in turn. `None`: all have one.
    is_embed: tuple[int, ...] | None = None


class Features(Struct, frozen=True, kw_only=True):
    """Processed media: modality -> a list with one entry per item."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[Placeholder]]
    kwargs_data: dict[str, list[Any]] | None = None  # base64 in JSON, bytes in msgpack


class RenderedRequest(Struct, frozen=True, kw_only=True):
    """A `GenerateRequest` as the routes that render write it."""

    request_id: str
    token_ids: TokenIds
    features: Features | None = None
    content_parts: None = None
    sampling_params: dict[str, Any] = {}  # only what the caller gave; the other server has defaults
    model: str
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0


class DerenderedChatChunk(Struct, frozen=True, kw_only=True):
    chunk: ChatCompletionChunk
    stream_state: str  # to be sent with the next chunk


class DerenderedCompletionChunk(Struct, frozen=True, kw_only=True):
    chunk: Completion
    stream_state: str  # to be sent with the next chunk
