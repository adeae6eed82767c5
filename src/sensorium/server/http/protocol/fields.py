"""Types of single fields of requests, and the fields that come from `SamplingParams`.

Types are strict: "5" is not a number, but 1.0 is an integer (see `types.checking`). Numbers are
bounded so that they can be sent to other processes, or have the bounds of `SamplingParams`. Lists
are bounded because some are searched for every token, on the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from sensorium.types.sampling import MAX_BIAS, SamplingField, list_sampling_fields

MAX_INTEGER = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
_MAX_TEXTS = 64
_MAX_TEXT_LENGTH = 1024
_MAX_BIASES = 4096
_MAX_TOKEN_IDS = 65_536

Integer = Annotated[int, Meta(ge=-MAX_INTEGER - 1, le=MAX_INTEGER)]
Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Length = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
FilledText = Annotated[str, Meta(min_length=1)]
JsonObject = dict[str, Any]
# A field that is refused unless it is null; see `server.http.openai.params`.
Unsupported = Annotated[Any, Meta(extra_json_schema={"type": "null"})]

# Empty texts are refused by `SamplingParams`, with the path of the whole list.
_Text = Annotated[str, Meta(max_length=_MAX_TEXT_LENGTH, extra_json_schema={"minLength": 1})]
_TextOrList = _Text | Annotated[list[_Text], Meta(max_length=_MAX_TEXTS)]
_Bias = Annotated[
    float, Meta(extra_json_schema={"minimum": -MAX_BIAS, "maximum": MAX_BIAS})
]  # checked by `SamplingParams`
_Biases = Annotated[
    dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], _Bias], Meta(max_length=_MAX_BIASES)
]


def refer_to(name: str) -> dict[str, str]:
    """Return a reference to a schema of the OpenAPI document."""
    return {"$ref": f"#/components/schemas/{name}"}


_STRUCTURED = {**refer_to("StructuredOutputs"), "minProperties": 1, "maxProperties": 1}


def _make_wire_type(declared: SamplingField) -> Any:
    if declared.kind == "integer":
        least = -MAX_INTEGER - 1 if declared.least is None else int(declared.least)
        most = MAX_INTEGER if declared.most is None else int(declared.most)
        return Annotated[int, Meta(ge=least, le=most)]
    if declared.kind == "number":
        return Annotated[float, Meta(ge=declared.least, le=declared.most)]
    if declared.kind == "token_ids":
        length = Meta(min_length=declared.min_length or None, max_length=_MAX_TOKEN_IDS)
        return Annotated[list[TokenId], length]
    return {
        "flag": bool,
        "texts": _TextOrList,
        "words": _TextOrList,
        "biases": _Biases,
        # Checked by `SamplingParams`.
        "structured": Annotated[JsonObject, Meta(extra_json_schema=_STRUCTURED)],
    }[declared.kind]


SAMPLING_FIELDS = tuple(entry for entry in list_sampling_fields() if not entry.is_internal)
if TYPE_CHECKING:

    class SamplingFields(Struct, frozen=True, kw_only=True):
        """A struct with all parameters that a caller may set. `null` is as good as absent."""

        def __getattr__(self, name: str) -> Any: ...

else:
    SamplingFields = msgspec.defstruct(
        "SamplingFields",
        [
            (
                entry.name,
                Annotated[_make_wire_type(entry) | None, Meta(description=entry.description)],
                None,
            )
            for entry in SAMPLING_FIELDS
        ],
        module=__name__,
        frozen=True,
        kw_only=True,
    )


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the answer must look like: exactly one of the fields.

    Only for the OpenAPI document: `types.structured` checks it.
    """

    json: JsonObject | FilledText | msgspec.UnsetType = msgspec.UNSET
    json_object: bool | msgspec.UnsetType = msgspec.UNSET
    regex: FilledText | msgspec.UnsetType = msgspec.UNSET
    choice: Annotated[list[FilledText], Meta(min_length=1)] | msgspec.UnsetType = msgspec.UNSET
    grammar: FilledText | msgspec.UnsetType = msgspec.UNSET
