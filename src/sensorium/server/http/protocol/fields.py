"""Types of single fields. Strict as JSON is: "5" is no number, 1 is one wherever 1.0 is, and 1.0 is
an integer.

Numbers are bounded by what other processes can be told, or as `SamplingParams` bounds them. Lists
are bounded by what may be looked through with every token: the event loop looks for stop strings.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from sensorium.types.sampling import MAX_BIAS, MAX_LOGPROBS, MAX_N

_MAX_INTEGER = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
_MAX_TEXTS = 64
_MAX_TEXT_LENGTH = 1024
_MAX_BIASES = 4096
_MAX_TOKEN_IDS = 65_536


def as_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


_WHOLE = BeforeValidator(as_integer)
Integer = Annotated[int, Field(ge=-(2**63), le=_MAX_INTEGER), _WHOLE]
Count = Annotated[int, Field(ge=0, le=_MAX_INTEGER), _WHOLE]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID), _WHOLE]
Length = Annotated[int, Field(ge=1, le=_MAX_INTEGER), _WHOLE]
NumChoices = Annotated[int, Field(ge=1, le=MAX_N), _WHOLE]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), _WHOLE]
TopK = Annotated[int, Field(ge=-1, le=_MAX_INTEGER), _WHOLE]  # some clients say -1 for "no limit"
Number = Annotated[float, Field(allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(ge=1e-9, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
JsonObject = dict[str, Any]
# What is refused unless it is null; see `server.sampling`.
Unsupported = Annotated[Any, WithJsonSchema({"type": "null"})]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


_TEXT: JsonObject = {"type": "string", "minLength": 1, "maxLength": _MAX_TEXT_LENGTH}
_TEXT_OR_LIST: JsonObject = {
    "anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": _MAX_TEXTS}]
}
TextOrList = Annotated[
    list[Annotated[str, Field(max_length=_MAX_TEXT_LENGTH)]],
    Field(max_length=_MAX_TEXTS),
    BeforeValidator(_as_list),
    WithJsonSchema(_TEXT_OR_LIST),
]
TokenIdList = Annotated[list[TokenId], Field(max_length=_MAX_TOKEN_IDS)]

_LOGIT_BIAS: JsonObject = {
    "type": "object",
    "patternProperties": {
        "^[0-9]{1,9}$": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
    },
    "additionalProperties": False,
    "maxProperties": _MAX_BIASES,
}


def _check_biases(value: object) -> object:
    """Before each of them is looked at: every bad one would have an error of its own."""
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise ValueError(f"at most {_MAX_BIASES} biases")
    return value


LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Number],
    Field(max_length=_MAX_BIASES),
    BeforeValidator(_check_biases),
    WithJsonSchema(_LOGIT_BIAS),
]
