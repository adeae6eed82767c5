"""What `/v1/completions` takes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, WithJsonSchema

from sensorium.server.http.protocol.fields import (
    MAX_TOKEN_ID,
    Integer,
    JsonObject,
    NumLogprobs,
    Unsupported,
    as_integer,
)
from sensorium.server.http.protocol.generating import GeneratingRequest
from sensorium.types.errors import RequestError, at, map_at

PromptEntry = str | list[int]
_KINDS = "text, token ids, or a list of either"
_TEXT: JsonObject = {"type": "string", "minLength": 1}
_TOKEN_IDS: JsonObject = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID},
    "minItems": 1,
}
_PROMPT: JsonObject = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ]
}


def _split(value: object) -> list[PromptEntry]:
    """One entry per prompt. By hand: a union of types would read a million ids four times."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise RequestError(f"must be {_KINDS}, and not empty", path=("prompt",))
    if isinstance(as_integer(value[0]), int):
        with at("prompt"):
            return [_read_token_ids(value)]
    for index, entry in enumerate(value):
        if type(entry) is not type(value[0]) or not isinstance(entry, str | list):
            raise RequestError(f"must be of one kind: {_KINDS}", path=("prompt", index))
    with at("prompt"):
        return map_at(lambda e: _read_token_ids(e) if isinstance(e, list) else e, value)


def _read_token_ids(ids: list[Any]) -> list[int]:
    if not ids:
        raise RequestError("must not be empty")
    token_ids: list[int] = []
    for index, entry in enumerate(ids):
        token_id = as_integer(entry)
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise RequestError("must be a token id", path=(index,))
        token_ids.append(token_id)
    return token_ids


class CompletionRequest(GeneratingRequest):
    """One or more prompts. Without `max_tokens`, 16 tokens each."""

    unsupported: ClassVar[tuple[str, ...]] = (*GeneratingRequest.unsupported, "suffix")

    prompt: Annotated[Any, BeforeValidator(_split), WithJsonSchema(_PROMPT)]
    best_of: Integer | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    suffix: Unsupported = None
