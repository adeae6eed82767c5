"""The bodies of the routes that work on tokens: `/inference/v1/generate` and those that derender.

The answer of one route is the request of another: rendering makes a `GenerateRequest`, and
derendering takes the answer of `/inference/v1/generate`. Names are those of vLLM, except for
`prompt_token_ids`.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from sensorium.server.http.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    Count,
    FilledText,
    Integer,
    JsonObject,
    Messages,
    SamplingFields,
    StreamOptions,
    TokenId,
)

MAX_ID_LENGTH = 256
MAX_ITEMS = 2**14  # of one modality in one prompt
MAX_CHOICES = 1024
MAX_TOKENS = 2**18  # in one call that derenders
MAX_STATE_CHARACTERS = 2**21
_MAX_MODALITIES = 16

_Entry = TypeVar("_Entry")
_Few = Annotated[list[_Entry], Meta(max_length=MAX_ITEMS)]
_ByModality = Annotated[dict[str, _Few[_Entry]], Meta(max_length=_MAX_MODALITIES)]
# Text in JSON and bytes in msgpack. Checked by `server.http.tokens.features`.
_ITEM: JsonObject = {"anyOf": [{"type": "string", "contentEncoding": "base64"}, {"type": "null"}]}
_Item = Annotated[Any, Meta(extra_json_schema=_ITEM)]
_Id = Annotated[str, Meta(max_length=MAX_ID_LENGTH)]
_Tokens = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
_State = Annotated[str, Meta(max_length=MAX_STATE_CHARACTERS)]


class WireSamplingParams(SamplingFields, frozen=True, kw_only=True):
    """Sampling parameters by their names. `null` is as good as absent."""


class WirePlaceholder(Struct, frozen=True, kw_only=True):
    """The place of an item in the prompt."""

    offset: Count
    length: Count
    is_embed: Annotated[
        list[Count] | None,
        Meta(
            description="Lengths of runs of positions without and with an embedding, in turn. "
            "Null: all have one."
        ),
    ] = None


class WireFeatures(Struct, frozen=True, kw_only=True):
    """Processed media: modality -> a list with one entry per item."""

    mm_hashes: _ByModality[str]
    mm_placeholders: _ByModality[WirePlaceholder]
    kwargs_data: Annotated[
        _ByModality[_Item] | None,
        Meta(description="Null for an item, or for all, means that the server has it."),
    ] = None


class WireMediaPart(Struct, frozen=True, kw_only=True):
    """Media for the server to load. The tokens have one marker per part."""

    type: str
    url: str | None = None
    uuid: str | None = None


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """Tokens to continue. `features` and `content_parts` exclude each other."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_LENGTH)] | None = None
    model: str | None = None
    features: WireFeatures | None = None
    content_parts: _Few[WireMediaPart] | None = None
    sampling_params: WireSamplingParams = WireSamplingParams()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: FilledText | None = None
    priority: Integer | None = None
    trace: bool | None = None


class WireUsage(Struct, frozen=True, kw_only=True):
    """Counts of tokens, as `/inference/v1/generate` answers them."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: JsonObject | None = None


class WireGenerateChoice(Struct, frozen=True, kw_only=True):
    """One completion, as `/inference/v1/generate` answers it."""

    index: Count = 0
    token_ids: _Tokens | None = None
    finish_reason: str | None = None
    stop_reason: Annotated[
        str | TokenId | UnsetType | None,
        Meta(
            description="The stop string or token. Null at the end of a sequence; left out where "
            "it is not known."
        ),
    ] = UNSET
    logprobs: JsonObject | None = None


class WireGenerateResponse(Struct, frozen=True, kw_only=True):
    """An answer of `/inference/v1/generate`, or a chunk of one."""

    request_id: _Id | None = None
    model: _Id | None = None
    created: Count | None = None
    choices: Annotated[list[WireGenerateChoice], Meta(max_length=MAX_CHOICES)]
    usage: WireUsage | None = None
    prompt_logprobs: Any = None


class ChatOptions(ChatCompletionRequest, frozen=True, kw_only=True):
    """The body of the chat. Its `messages` are not read, and may be left out."""

    messages: Messages = None


class CompletionOptions(CompletionRequest, frozen=True, kw_only=True):
    """The body of the completion. Its `prompt` is not read, and may be left out."""

    prompt: Any = None


class _DerenderRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    stream: Annotated[
        bool | None, Meta(description="Derender one `generate_chunk`, not a whole answer.")
    ] = None
    generate_chunk: WireGenerateResponse | None = None
    stream_state: Annotated[
        _State | None, Meta(description="What came with the chunk before; null for the first.")
    ] = None


class DerenderChatRequest(_DerenderRequest, frozen=True, kw_only=True):
    """An answer in `generate_response`, or with `stream` a chunk in `generate_chunk`."""

    generate_response: WireGenerateResponse | None = None
    prompt_tokens: Annotated[Count | None, Meta(description="How many tokens the prompt has.")] = (
        None
    )
    prompt_token_ids: Annotated[
        _Tokens | None,
        Meta(
            description="The prompt's last tokens, on which the text of the first token may depend."
        ),
    ] = None
    chat_request: ChatOptions | None = None


class DerenderCompletionRequest(_DerenderRequest, frozen=True, kw_only=True):
    """Answers in `generate_responses`, one per prompt, or with `stream` a `generate_chunk` of one.

    `prompt_tokens` and `prompt_token_ids` are lists with one entry per prompt; with `stream`, those
    of this prompt.
    """

    generate_responses: (
        Annotated[list[WireGenerateResponse], Meta(min_length=1, max_length=MAX_CHOICES)] | None
    ) = None
    prompt_tokens: Annotated[list[Count], Meta(max_length=MAX_CHOICES)] | Count | None = None
    # A list of tokens per prompt, or the list of the only prompt.
    prompt_token_ids: Annotated[list[TokenId | _Tokens], Meta(max_length=MAX_TOKENS)] | None = None
    completion_request: CompletionOptions | None = None
