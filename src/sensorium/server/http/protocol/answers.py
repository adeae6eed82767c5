"""The types of response bodies: OpenAI's, plus fields of similar servers if a client asks.

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
    """The log-probabilities of a completion's tokens; null for a token that nothing predicts."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # where the text of each token begins, in characters


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


# For each token of the prompt: token id in decimal -> its log-probability.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """The numbers of the prompt's tokens that were cached, or that stand for media.

    The tokens of a modality are the positions of the prompt that take embeddings of its media; the
    tokens around them, such as those that mark where an image begins, are text. Audio that a speech
    model attends to outside the prompt takes no positions. A modality without media has 0.
    `cached_tokens` counts text and media alike. Derendered answers have the counts that were sent
    with the generated tokens.
    """

    cached_tokens: int | UnsetType = UNSET  # those that came from the prefix cache
    image_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET


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
    content: str | None  # null if there are only reasoning or tool calls
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
    """One completion in a response of `/v1/completions`, or its new part in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None  # in a stream: null until the last chunk
    stop_reason: str | int | UnsetType | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class GenerateChoice(Struct, frozen=True, kw_only=True):
    """One completion in a response of `/inference/v1/generate`, or its new part in a chunk."""

    index: int
    token_ids: TokenIds
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = None
    logprobs: ChatLogprobs | None = None


class FunctionCallDelta(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallChunk(Struct, frozen=True, kw_only=True):
    """A part of one tool call in a chunk of a stream.

    Only the first part has the id, the type and the name. The `arguments` of all parts are joined.
    """

    index: int  # of the tool call in the answer
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
    """A whole response of `/v1/completions`, or one chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    sensorium_trace: Any | UnsetType = UNSET


class GenerateResponse(Struct, frozen=True, kw_only=True):
    """A whole response of `/inference/v1/generate`, or one chunk of a stream."""

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
    modalities: list[str]  # that a prompt may have: "text", and kinds of media
    # What the server does with this model: "chat", "completions", "transcription", "translation".
    capabilities: list[str]
    switched_off: dict[str, str] = {}  # kind of media -> the reason why it can't be used
    only_one: dict[str, str] = {}  # kind of media -> why a prompt may have only one of it


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
    """The token range of a media item in the prompt: `length` tokens from index `offset` on."""

    offset: int
    length: int
    # Lengths of alternating runs of positions, first without an embedding, then with one, and so
    # on. `None`: every position has an embedding.
    is_embed: tuple[int, ...] | None = None


class Features(Struct, frozen=True, kw_only=True):
    """The processed media items of a prompt: hashes, token ranges and tensors by modality.

    Each field maps a modality to a list with one entry for each media item.
    """

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[Placeholder]]
    kwargs_data: dict[str, list[Any]] | None = None  # tensors; base64 in JSON, bytes in msgpack


class RenderedRequest(Struct, frozen=True, kw_only=True):
    """A rendered prompt, in the form of a request body for `/inference/v1/generate`."""

    request_id: str
    token_ids: TokenIds
    features: Features | None = None
    content_parts: None = None
    sampling_params: dict[str, Any] = {}  # only what differs from the defaults
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
