"""Token in, token out: what `/render` answers and `/inference/v1/generate` takes, and what that
answers and `/derender` takes. Names as in vLLM.

Read by pydantic, as all bodies are; written as structs. `is_embed` travels as the lengths of runs
that begin with one of False; `null` is all True. In JSON an item of `kwargs_data` is base64, in
msgpack it is the bytes themselves: see `multimodal.item_codec`.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from msgspec import UNSET, Struct, UnsetType
from pydantic import BeforeValidator, Field, WithJsonSchema

from sensorium.server.http.protocol.answers import TokenIds, Usage
from sensorium.server.http.protocol.fields import (
    MAX_TOKEN_ID,
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
)
from sensorium.server.http.protocol.generating import StreamOptions, WireModel
from sensorium.server.http.protocol.logprobs import ChatLogprobs, PromptLogprobs

MAX_ID_LENGTH = 256
MAX_ITEMS = 2**14  # of one modality in one prompt
_MAX_MODALITIES = 16

# ---- what is read


def _check_entries(value: object) -> object:
    """Before each of them is looked at: every bad one would have an error of its own."""
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        raise ValueError(f"at most {MAX_ITEMS} entries")
    return value


def _check_modalities(value: object) -> object:
    if isinstance(value, dict) and len(value) > _MAX_MODALITIES:
        raise ValueError(f"at most {_MAX_MODALITIES} modalities")
    return value


_Entry = TypeVar("_Entry")
_Few = Annotated[list[_Entry], BeforeValidator(_check_entries)]
_ByModality = Annotated[dict[str, _Few[_Entry]], BeforeValidator(_check_modalities)]
_ItemBytes = Annotated[str | bytes, WithJsonSchema({"type": "string", "contentEncoding": "base64"})]
_RUNS: JsonObject = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TOKEN_IDS: JsonObject = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID},
    "minItems": 1,
}


class WireSamplingParams(WireModel):
    """`SamplingParams` by their names. `null` is as good as absent."""

    n: NumChoices | None = None
    max_tokens: Length | None = None
    min_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    bad_words: TextOrList | None = None
    allowed_token_ids: Annotated[TokenIdList, Field(min_length=1)] | None = None
    seed: Integer | None = None
    stop: TextOrList | None = None
    stop_token_ids: TokenIdList | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    structured_outputs: JsonObject | None = None
    skip_special_tokens: bool | None = None


class WirePlaceholder(WireModel):
    """`is_embed` is read by `server.http.features`: it may be long."""

    offset: Count
    length: Count
    is_embed: Annotated[list[Any], WithJsonSchema(_RUNS)] | None = None


class WireFeatures(WireModel):
    """By modality, each a list with one entry per item. `kwargs_data`: an item, or null for what
    the server has; left out, it has all of them.
    """

    mm_hashes: _ByModality[str]
    mm_placeholders: _ByModality[WirePlaceholder]
    kwargs_data: _ByModality[_ItemBytes | None] | None = None


class ContentPart(WireModel):
    """Media that the server is to load itself: the tokens have one marker per part."""

    type: str
    url: str | None = None
    uuid: str | None = None


class GenerateRequest(WireModel):
    """`features` and `content_parts` exclude each other."""

    token_ids: Annotated[list[Any], Field(min_length=1), WithJsonSchema(_TOKEN_IDS)]
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)] | None = None
    model: str | None = None
    features: WireFeatures | None = None
    content_parts: _Few[ContentPart] | None = None
    sampling_params: WireSamplingParams = WireSamplingParams()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: Integer | None = None
    trace: bool | None = None


# ---- what is written


class Placeholder(Struct, frozen=True, kw_only=True):
    offset: int
    length: int
    is_embed: tuple[int, ...] | None = None


class Features(Struct, frozen=True, kw_only=True):
    """An item of `kwargs_data` is text in JSON and bytes in msgpack: no schema has both."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[Placeholder]]
    kwargs_data: dict[str, list[Any]] | None = None


class RenderedRequest(Struct, frozen=True, kw_only=True):
    """A `GenerateRequest` as the routes that render write it. `sampling_params` has what the
    caller said, and nothing else: what is not said is the generating server's to choose.
    """

    request_id: str
    token_ids: TokenIds
    features: Features | None = None
    content_parts: None = None
    sampling_params: dict[str, Any] = {}
    model: str
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0


class GenerateChoice(Struct, frozen=True, kw_only=True):
    """In chunks, too: there `token_ids` are those that are new, and `finish_reason` is null until
    the last. `stop_reason`: the stop string or token that ended it.
    """

    index: int
    token_ids: TokenIds
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None


class GenerateResponse(Struct, frozen=True, kw_only=True):
    """In chunks, too: there `usage` is where it was asked for."""

    request_id: str
    model: str
    created: int
    choices: list[GenerateChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    sensorium_trace: Any | UnsetType = UNSET
