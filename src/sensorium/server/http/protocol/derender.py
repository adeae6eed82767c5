"""What the routes that derender take and answer. Names as in vLLM, but for `prompt_token_ids`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct
from pydantic import Field

from sensorium.server.http.protocol.answers import ChatCompletionChunk, Completion
from sensorium.server.http.protocol.chat import ChatCompletionRequest, Messages
from sensorium.server.http.protocol.completions import CompletionRequest
from sensorium.server.http.protocol.fields import Count, JsonObject, TokenId
from sensorium.server.http.protocol.generating import WireModel

MAX_TOKENS = 2**18  # of one body
MAX_CHOICES = 1024
MAX_STATE_CHARACTERS = 2**21
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]
_Id = Annotated[str, Field(max_length=256)]


class WireUsage(WireModel):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: JsonObject | None = None


class WireGenerateChoice(WireModel):
    """`stop_reason`: the stop string or token; null at the end of a sequence; left out where
    nobody knows. `logprobs`: as in a chat's answer.
    """

    index: Count = 0
    token_ids: TokenIds | None = None
    finish_reason: str | None = None
    stop_reason: str | TokenId | None = None
    logprobs: JsonObject | None = None


class WireGenerateResponse(WireModel):
    """What `/inference/v1/generate` answers; in chunks, too."""

    request_id: _Id | None = None
    model: _Id | None = None
    created: Count | None = None
    choices: Annotated[list[WireGenerateChoice], Field(max_length=MAX_CHOICES)]
    usage: WireUsage | None = None
    prompt_logprobs: Any = None


class ChatOptions(ChatCompletionRequest):
    """The body of the chat. Its `messages` may be left out: nothing is read of them."""

    messages: Messages = None


class CompletionOptions(CompletionRequest):
    """The body of the completion. Its `prompt` may be left out: nothing is read of it."""

    prompt: Any = None


class DerenderChatRequest(WireModel):
    """`generate_response`, or with `stream` one `generate_chunk` and the `stream_state` that came
    with the one before. `prompt_token_ids`: the prompt's last tokens, which the first token's text
    may depend on. `prompt_tokens`: how many it has.
    """

    model: str | None = None
    stream: bool | None = None
    generate_response: WireGenerateResponse | None = None
    generate_chunk: WireGenerateResponse | None = None
    stream_state: Annotated[str, Field(max_length=MAX_STATE_CHARACTERS)] | None = None
    prompt_tokens: Count | None = None
    prompt_token_ids: TokenIds | None = None
    chat_request: ChatOptions | None = None


class DerenderCompletionRequest(WireModel):
    """`generate_responses`, one a prompt, or with `stream` one `generate_chunk` of one prompt and
    the `stream_state` that came with the one before. `prompt_tokens` and `prompt_token_ids` are
    lists with one entry per prompt; with `stream`, that of this prompt.
    """

    model: str | None = None
    stream: bool | None = None
    generate_responses: (
        Annotated[list[WireGenerateResponse], Field(min_length=1, max_length=MAX_CHOICES)] | None
    ) = None
    generate_chunk: WireGenerateResponse | None = None
    stream_state: Annotated[str, Field(max_length=MAX_STATE_CHARACTERS)] | None = None
    prompt_tokens: Annotated[list[Count], Field(max_length=MAX_CHOICES)] | Count | None = None
    prompt_token_ids: Annotated[list[TokenIds], Field(max_length=MAX_CHOICES)] | TokenIds | None = (
        None
    )
    completion_request: CompletionOptions | None = None


class DerenderedChatChunk(Struct, frozen=True, kw_only=True):
    """`stream_state` goes with the next chunk."""

    chunk: ChatCompletionChunk
    stream_state: str


class DerenderedCompletionChunk(Struct, frozen=True, kw_only=True):
    chunk: Completion
    stream_state: str
