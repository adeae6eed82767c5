"""The fields that all requests for text have in common."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from sensorium.server.http.protocol.fields import (
    Count,
    Integer,
    JsonObject,
    Length,
    LogitBias,
    MinP,
    NumChoices,
    NumLogprobs,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TextOrList,
    TokenIdList,
    TopK,
    TopP,
    Unsupported,
)
from sensorium.types.structured import MAX_CHARACTERS


def _make_format(kind: str, **properties: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "properties": {"type": {"const": kind, "type": "string"}, **properties},
        "required": ["type", *properties],
    }


_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "schema": {"type": "object"},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["schema"],
}
_RESPONSE_FORMAT: JsonObject = {
    "anyOf": [
        _make_format("text"),
        _make_format("json_object"),
        _make_format("json_schema", json_schema=_SCHEMA),
    ]
}
_Regex = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS["regex"])]
_Grammar = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS["grammar"])]
_Choices = Annotated[list[_Grammar], Field(min_length=1)]
# Checked by hand: errors of a union would name its types.
_OBJECT_OR_TEXT: JsonObject = {
    "anyOf": [{"type": "object"}, {"type": "string", "minLength": 1}, {"type": "null"}]
}
_STRUCTURED: JsonObject = {
    "type": "object",
    "properties": {
        "json": {"anyOf": [{"type": "object"}, {"type": "string", "minLength": 1}]},
        "json_object": {"type": "boolean"},
        "regex": {"type": "string", "minLength": 1},
        "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        "grammar": {"type": "string", "minLength": 1},
    },
    "minProperties": 1,
    "maxProperties": 1,
    "additionalProperties": False,
}


class WireModel(BaseModel):
    """Fields that nobody knows are kept, and warned about where the body is read."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(WireModel):
    """`include_usage`: a last chunk counts the tokens. `continuous_usage_stats`: then all do."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GeneratingRequest(WireModel):
    """OpenAI's fields and the extras of this field's servers. `null` is as good as absent.

    One of `response_format`, `guided_*` and `structured_outputs` may say what the answer must look
    like.

    `user` and the fields after it are taken and have no effect.
    """

    # Fields of others that change the answer: refused, as ignoring them would be wrong.
    unsupported: ClassVar[tuple[str, ...]] = ("use_beam_search",)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    max_tokens: Length | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Integer | None = None
    stop: TextOrList | None = None
    response_format: Annotated[JsonObject, WithJsonSchema(_RESPONSE_FORMAT)] | None = None

    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIdList | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: TextOrList | None = None
    allowed_token_ids: Annotated[TokenIdList, Field(min_length=1)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    mm_processor_kwargs: JsonObject | None = None
    media_io_kwargs: dict[str, JsonObject] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: Integer | None = None
    trace: bool | None = None
    guided_json: Annotated[Any, WithJsonSchema(_OBJECT_OR_TEXT)] = None
    guided_regex: _Regex | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Grammar | None = None
    structured_outputs: Annotated[JsonObject, WithJsonSchema(_STRUCTURED)] | None = None
    use_beam_search: Unsupported = None

    user: str | None = None
    service_tier: str | None = None
    request_id: str | None = None
