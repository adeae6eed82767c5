"""The types of request bodies of `/inference/v1/generate` and of the routes that derender.

To derender is to turn generated token ids into OpenAI's responses. Rendering makes a
`GenerateRequest`, and derendering takes the response of `/inference/v1/generate`. Names are those
of vLLM, except for `prompt_token_ids`.
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
MAX_ITEMS = 2**14  # media items of one modality in one prompt
MAX_CHOICES = 1024
MAX_TOKENS = 2**18  # in one request that derenders
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
    """The sampling parameters of a request; null means the default value."""


class WirePlaceholder(Struct, frozen=True, kw_only=True):
    """The token range of a media item in the prompt: `length` tokens from index `offset` on."""

    offset: Count
    length: Count
    is_embed: Annotated[
        list[Count] | None,
        Meta(
            description="Lengths of alternating runs of positions: first without an embedding, "
            "then with one, and so on. Null: every position has an embedding."
        ),
    ] = None


class WireFeatures(Struct, frozen=True, kw_only=True):
    """The processed media items of a prompt: hashes, token ranges and tensors by modality.

    Each field maps a modality to a list with one entry for each media item.
    """

    mm_hashes: _ByModality[str]
    mm_placeholders: _ByModality[WirePlaceholder]
    kwargs_data: Annotated[
        _ByModality[_Item] | None,
        Meta(
            description="The tensors of each media item. Null for one item, or instead of all, "
            "means that the server has them in its cache."
        ),
    ] = None


class WireMediaPart(Struct, frozen=True, kw_only=True):
    """A media item that the server loads from its URL, or finds by its uuid in the cache.

    The n-th marker of a modality in the prompt's token ids stands for the n-th part of that
    modality.
    """

    type: str
    url: str | None = None
    uuid: str | None = None


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """The request body of `/inference/v1/generate`: token ids that the model continues.

    Media items are in `features` if they are processed, else in `content_parts`, but never in both.
    """

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
    """The counts of tokens in a response of `/inference/v1/generate`."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    total_tokens: Count | None = None
    prompt_tokens_details: JsonObject | None = None


class WireGenerateChoice(Struct, frozen=True, kw_only=True):
    """One completion in a response of `/inference/v1/generate`, or its new part in a chunk."""

    index: Count = 0
    token_ids: _Tokens | None = None
    finish_reason: str | None = None
    stop_reason: Annotated[
        str | TokenId | UnsetType | None,
        Meta(
            description="The stop string or token that ended the completion. Null if an "
            "end-of-sequence token did; left out if it is not known."
        ),
    ] = UNSET
    logprobs: JsonObject | None = None


class WireGenerateResponse(Struct, frozen=True, kw_only=True):
    """A whole response of `/inference/v1/generate`, or one chunk of a stream."""

    request_id: _Id | None = None
    model: _Id | None = None
    created: Count | None = None
    choices: Annotated[list[WireGenerateChoice], Meta(max_length=MAX_CHOICES)]
    usage: WireUsage | None = None
    prompt_logprobs: Any = None


class ChatOptions(ChatCompletionRequest, frozen=True, kw_only=True):
    """The client's chat request, which decides how text is read; its `messages` are not used."""

    messages: Messages = None


class CompletionOptions(CompletionRequest, frozen=True, kw_only=True):
    """The client's completion request, which decides how text is read; its `prompt` is not used."""

    prompt: Any = None


class _DerenderRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    stream: Annotated[
        bool | None, Meta(description="Convert one `generate_chunk`, not a whole response.")
    ] = None
    generate_chunk: WireGenerateResponse | None = None
    stream_state: Annotated[
        _State | None, Meta(description="The state from the last response; null at first.")
    ] = None


class DerenderChatRequest(_DerenderRequest, frozen=True, kw_only=True):
    """The body of a request to turn generated token ids into a chat completion, or into a chunk.

    The token ids are in one whole `generate_response` or, with `stream`, in one `generate_chunk`.
    """

    generate_response: WireGenerateResponse | None = None
    prompt_tokens: Annotated[Count | None, Meta(description="How many tokens the prompt has.")] = (
        None
    )
    prompt_token_ids: Annotated[
        _Tokens | None,
        Meta(
            description="The prompt's token ids, or only the last ones. The text of the first "
            "generated token may depend on them."
        ),
    ] = None
    chat_request: ChatOptions | None = None


class DerenderCompletionRequest(_DerenderRequest, frozen=True, kw_only=True):
    """The body of a request to turn generated token ids into completions, or into a chunk.

    The token ids are in whole `generate_responses`, one for each prompt, or, with `stream`, in one
    `generate_chunk`. `prompt_tokens` (the length of a prompt) and `prompt_token_ids` are lists with
    one entry for each prompt.
    """

    generate_responses: (
        Annotated[list[WireGenerateResponse], Meta(min_length=1, max_length=MAX_CHOICES)] | None
    ) = None
    prompt_tokens: Annotated[list[Count], Meta(max_length=MAX_CHOICES)] | Count | None = None
    # A list of tokens per prompt, or the list of the only prompt.
    prompt_token_ids: Annotated[list[TokenId | _Tokens], Meta(max_length=MAX_TOKENS)] | None = None
    completion_request: CompletionOptions | None = None
