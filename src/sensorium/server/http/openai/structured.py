"""The ways in which a request says what its answer must look like: OpenAI's and vLLM's, as one
value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sensorium.server.http.errors import ApiError
from sensorium.server.http.protocol.generating import GeneratingRequest
from sensorium.types.errors import RequestError
from sensorium.types.sampling import SamplingParams
from sensorium.types.structured import StructuredOutputsParams

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_OWN_NAME = "structured_outputs"


def get_structured_outputs(request: GeneratingRequest) -> StructuredOutputsParams | None:
    """`None`: any text will do. An `ApiError` names the field."""
    path = find_structured_path(request)
    if path is None:
        return None
    field = path.partition(".")[0]
    try:
        value: Mapping[str, Any] = _read(request, field)
        return SamplingParams(structured_outputs=value).structured_outputs  # type: ignore[arg-type]
    except RequestError as error:
        message, param = rename_structured(str(error), path)
        raise ApiError(message, param=param or field) from error


def find_structured_path(request: GeneratingRequest) -> str | None:
    """Where the request says it, or `None`. Raises an `ApiError` if it says it twice."""
    given = [name for name in (*_GUIDED, _OWN_NAME) if getattr(request, name) is not None]
    kind = _get_format(request)
    if kind is not None:
        given.insert(0, "response_format.json_schema.schema" if kind == "json_schema" else kind)
    if len(given) > 1:
        last = given[-1]
        raise ApiError(f"{last}: only one field may say what the answer looks like", param=last)
    return given[0] if given else None


def find_constraint_path(request: GeneratingRequest) -> str | None:
    """The field because of which an answer has to look like something, or `None`."""
    choice = getattr(request, "tool_choice", None)
    demands_call = choice not in (None, "auto", "none")
    return "tools" if demands_call else find_structured_path(request)


def rename_structured(message: str, path: str) -> tuple[str, str | None]:
    """A text of the engine in the request's own words, with the field that it speaks of; `None` if
    it speaks of something else.
    """
    words = message.split(maxsplit=1)
    name = words[0].rstrip(":") if words else ""
    if name != _OWN_NAME and not name.startswith(f"{_OWN_NAME}."):
        return message, None
    if path == _OWN_NAME:
        return message, name
    return path + message.removeprefix(name), path


def _get_format(request: GeneratingRequest) -> str | None:
    """What `response_format` asks for, as far as it isn't text."""
    kind = (request.response_format or {}).get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return "response_format"
    if kind == "json_schema":
        return "json_schema"
    raise ApiError(
        "response_format.type must be text, json_object or json_schema",
        param="response_format.type",
    )


def _read(request: GeneratingRequest, field: str) -> dict[str, Any]:
    if field == _OWN_NAME:
        return request.structured_outputs or {}
    if field in _GUIDED:
        return {_GUIDED[field]: getattr(request, field)}
    if _get_format(request) == "response_format":
        return {"json_object": True}
    wrapped = (request.response_format or {}).get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if not isinstance(schema, dict):
        path = "response_format.json_schema" + (".schema" if isinstance(wrapped, dict) else "")
        raise ApiError(f"{path} must be an object", param=path)
    return {"json": schema}
