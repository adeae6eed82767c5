"""Makes the `SamplingParams` of a request, and refuses fields that are not supported.

A request can constrain the form of its answer in three ways, which are read into one value:
OpenAI's `response_format`, and `guided_*` and `structured_outputs` of vLLM.
"""

from __future__ import annotations

from typing import Any

from sensorium.server.http.errors import ApiError
from sensorium.server.http.protocol.requests import (
    SAMPLING_FIELDS,
    ChatCompletionRequest,
    CompletionRequest,
    GeneratingRequest,
)
from sensorium.types.errors import FieldPath, RequestError
from sensorium.types.sampling import SamplingParams
from sensorium.types.structured import StructuredOutputsParams

# Parameters that have other names in OpenAI's requests, or defaults that depend on the route.
_OWN_WAYS = ("max_tokens", "logprobs", "structured_outputs")
# fields of a request -> the fields of `StructuredOutputsParams` that they stand for
_GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
_OWN_NAME = "structured_outputs"
_FORMAT: FieldPath = ("response_format",)
_SCHEMA: FieldPath = (*_FORMAT, "json_schema", "schema")
_SAME_NAMES = tuple(entry.name for entry in SAMPLING_FIELDS if entry.name not in _OWN_WAYS)


def make_chat_params(request: ChatCompletionRequest) -> SamplingParams:
    """Return a chat's sampling parameters; by default the answer may fill the model's context."""
    _check_common(request)
    if request.modalities is not None and request.modalities != ["text"]:
        raise make_unsupported("modalities", "other than text")
    if request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    limit = request.max_completion_tokens
    return SamplingParams(
        **_get_given(request),
        max_tokens=request.max_tokens if limit is None else limit,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def make_completion_params(request: CompletionRequest) -> SamplingParams:
    """Return a completion's sampling parameters; `max_tokens` keeps the default of the class."""
    _check_common(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise make_unsupported("best_of", "other than n")
    given = _get_given(request)
    if request.echo and request.logprobs is not None:
        if request.stream:
            raise ApiError(
                "echo with logprobs can't be streamed: set stream to false", param="echo"
            )
        given.setdefault("prompt_logprobs", request.logprobs)
    if request.max_tokens is not None:
        given["max_tokens"] = request.max_tokens
    return SamplingParams(**given, logprobs=request.logprobs)


def _get_given(request: GeneratingRequest) -> dict[str, Any]:
    """Return the parameters that the client has set, without those that differ between routes."""
    values = {name: getattr(request, name) for name in _SAME_NAMES}
    values["structured_outputs"] = _get_structured_outputs(request)
    return {name: value for name, value in values.items() if value is not None}


def _check_common(request: GeneratingRequest) -> None:
    for name in request.unsupported:
        if getattr(request, name):
            raise make_unsupported(name)
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError(
            "prompt_logprobs can't be streamed: set stream to false", param="prompt_logprobs"
        )


def make_unsupported(name: str, what: str = "") -> ApiError:
    """Return the error for an unsupported field, or for its unsupported values (`what`)."""
    words = f"{name} {what}".strip()
    return ApiError(f"{words}: this is not supported yet", param=name, code="unsupported")


def _get_structured_outputs(request: GeneratingRequest) -> StructuredOutputsParams | None:
    """Return the constraint on the form of the answer, or `None` if the answer may be any text.

    A `RequestError` has the path of the field in which the client sent the constraint.
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
    """Return the path of the field to name in errors about the constraint on the answer.

    It is `tools` if the request requires a tool call. Return `None` if the constraint is in
    `structured_outputs`, or if there is none.
    """
    if getattr(request, "tool_choice", None) not in (None, "auto", "none"):
        return ("tools",)
    path = _find_path(request)
    return None if path == (_OWN_NAME,) else path


def _find_path(request: GeneratingRequest) -> FieldPath | None:
    """Return the path of the only field that constrains the answer, or `None` if none does."""
    given: list[FieldPath] = [
        (name,) for name in (*_GUIDED, _OWN_NAME) if getattr(request, name) is not None
    ]
    kind = _get_format(request)
    if kind is not None:
        given.insert(0, _SCHEMA if kind == "json_schema" else _FORMAT)
    if len(given) > 1:
        raise RequestError(
            f"constrains the form of the answer, but {given[0][0]} does too: only one field may",
            path=given[-1],
        )
    return given[0] if given else None


def _get_format(request: GeneratingRequest) -> str | None:
    """Return the type in `response_format`: "json_object", "json_schema", or `None` for text."""
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
