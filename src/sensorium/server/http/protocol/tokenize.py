"""What `/tokenize` and `/detokenize` take and answer."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct
from pydantic import Field, WithJsonSchema

from sensorium.server.http.protocol.answers import TokenIds
from sensorium.server.http.protocol.fields import JsonObject, TokenId
from sensorium.server.http.protocol.generating import WireModel

MAX_CHARACTERS = 2**22
MAX_TOKENS = 2**20
_MESSAGES: JsonObject = {
    "anyOf": [
        {"type": "array", "items": {"$ref": "#/components/schemas/ChatMessage"}, "minItems": 1},
        {"type": "null"},
    ]
}


class TokenizeRequest(WireModel):
    """Either a `prompt` or `messages`, with what a conversation may have beside it."""

    model: str | None = None
    prompt: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None
    messages: Annotated[Any, WithJsonSchema(_MESSAGES)] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: list[JsonObject] | None = None
    mm_processor_kwargs: JsonObject | None = None
    media_io_kwargs: dict[str, JsonObject] | None = None


class DetokenizeRequest(WireModel):
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]
    model: str | None = None


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    """`token_strs`: the vocabulary's own names of the tokens, where they were asked for."""

    count: int
    max_model_len: int | None
    tokens: TokenIds
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct, frozen=True, kw_only=True):
    prompt: str
