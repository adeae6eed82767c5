"""Reads the fields that constrain the form of an answer, OpenAI's and vLLM's, into one value."""

from __future__ import annotations

from typing import Any

from sensorium.server.http.protocol.generating import GeneratingRequest
from sensorium.types.errors import FieldPath, RequestError
from sensorium.types.sampling import SamplingParams
from sensorium.types.structured import StructuredOutputsParams

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_OWN_NAME = "structured_outputs"
_FORMAT: FieldPath = ("response_format",)
_SCHEMA: FieldPath = (*_FORMAT, "json_schema", "schema")


def get_structured_outputs(request: GeneratingRequest) -> StructuredOutputsParams | None:
    """Return what the answer must look like, or `None` if any text will do.

    Raise a `RequestError` with the path of the field that the client has used.
    """
    path = _find_path(request)
    if path is None:
        return None
    value = _read(request, str(path[0]))
    try:
        return SamplingParams(structured_outputs=value).structured_outputs  # type: ignore[arg-type]
    except RequestError as error:
        own = error.path if path == (_OWN_NAME,) else path
        raise RequestError(error.message, path=own) from error


def find_constraint_path(request: GeneratingRequest) -> FieldPath | None:
    """Return the field that constrains the answer, if it isn't `structured_outputs` itself."""
    choice = getattr(request, "tool_choice", None)
    if choice not in (None, "auto", "none"):
        return ("tools",)
    path = _find_path(request)
    return None if path == (_OWN_NAME,) else path


def _find_path(request: GeneratingRequest) -> FieldPath | None:
    """Return the field that constrains the answer. Raise a `RequestError` if there are two."""
    given: list[FieldPath] = [
        (name,) for name in (*_GUIDED, _OWN_NAME) if getattr(request, name) is not None
    ]
    kind = _get_format(request)
    if kind is not None:
        given.insert(0, _SCHEMA if kind == "json_schema" else _FORMAT)
    if len(given) > 1:
        raise RequestError("only one field may say what the answer looks like", path=given[-1])
    return given[0] if given else None


def _get_format(request: GeneratingRequest) -> str | None:
    """Return the type that `response_format` asks for, or `None` if it is text."""
    kind = (request.response_format or {}).get("type", "text")
    if kind not in ("text", "json_object", "json_schema"):
        raise RequestError("must be text, json_object or json_schema", path=(*_FORMAT, "type"))
    return None if kind == "text" else str(kind)


def _read(request: GeneratingRequest, field: str) -> dict[str, Any]:
    if field == _OWN_NAME:
        return request.structured_outputs or {}
    if field in _GUIDED:
        return {_GUIDED[field]: getattr(request, field)}
    if _get_format(request) == "json_object":
        return {"json_object": True}
    wrapped = (request.response_format or {}).get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if not isinstance(schema, dict):
        path = _SCHEMA if isinstance(wrapped, dict) else _SCHEMA[:-1]
        raise RequestError("must be an object", path=path)
    return {"json": schema}
