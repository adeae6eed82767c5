"""What `/v1/completions` takes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, WithJsonSchema

from sensorium.server.protocol.fields import Integer, JsonObject, NumLogprobs
from sensorium.server.protocol.generating import GeneratingRequest
from sensorium.types.errors import RequestError

PromptEntry = str | list[int]
_MAX_TOKEN_ID = 2**31 - 1
_KINDS = "text, token ids, or a list of either"
_TOKEN_IDS: JsonObject = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": _MAX_TOKEN_ID},
    "minItems": 1,
}
_PROMPT: JsonObject = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ]
}


def _split(value: object) -> list[PromptEntry]:
    """One entry per prompt. By hand: a union of types would read a million ids four times."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise RequestError(f"prompt must be {_KINDS}, and not empty")
    if _is_integer(value[0]):
        _check_token_ids(value, "prompt")
        return [value]
    for index, entry in enumerate(value):
        if type(entry) is not type(value[0]) or not isinstance(entry, str | list):
            raise RequestError(f"prompt[{index}] must be of one kind: {_KINDS}")
        if isinstance(entry, list):
            _check_token_ids(entry, f"prompt[{index}]")
    return value


def _check_token_ids(ids: list[Any], path: str) -> None:
    if not ids:
        raise RequestError(f"{path} must not be empty")
    for index, token_id in enumerate(ids):
        if not _is_integer(token_id) or not 0 <= token_id <= _MAX_TOKEN_ID:
            raise RequestError(f"{path}[{index}] must be a token id")


def _is_integer(value: object) -> bool:
    return type(value) is int


class CompletionRequest(GeneratingRequest):
    """One or more prompts. Without `max_tokens`, 16 tokens each."""

    unsupported: ClassVar[tuple[str, ...]] = (*GeneratingRequest.unsupported, "suffix")

    prompt: Annotated[Any, BeforeValidator(_split), WithJsonSchema(_PROMPT)]
    best_of: Integer | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    suffix: str | None = None
