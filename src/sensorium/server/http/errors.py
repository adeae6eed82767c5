"""Turns errors into responses with a status and OpenAI's error object, and counts and logs them.

An error of the engine names a field by the engine's own name: `multi_modal_data.image[1]` is the
second image of a prompt. Only the HTTP layer can translate that to the field of the request, since
it depends on the route and on the way in which the client asked for structured output. `WirePaths`
does so. Fields of a conversation have the same names in both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.types.errors import (
    CapacityError,
    EngineLostError,
    FailedRequestError,
    FieldPath,
    MediaFetchError,
    MissingMediaError,
    RequestError,
    StoppingError,
    describe,
    format_path,
)

_MEDIA_FIELDS = ("multi_modal_data", "multi_modal_uuids")
_PROMPT_FIELDS = ("prompt", "prompt_token_ids")
logger = logging.getLogger(__name__)
RETRY_AFTER_S = 1
_INTERNAL_TEXT = "the server failed; its log has the reason under this request's id"


@dataclass(frozen=True, slots=True, kw_only=True)
class WirePaths:
    """The places of fields in one request. It holds no media, since it lives until the end."""

    # The field with the model's input. Errors that name no field are about it.
    input: FieldPath
    # The field with the text or the tokens of the prompt, if it is not `input`.
    prompt: FieldPath | None = None
    # modality -> the places of its items, in their order
    media: Mapping[str, Sequence[FieldPath]] = field(default_factory=dict)
    # The field that constrains the answer, if it isn't `structured_outputs`.
    structured: FieldPath | None = None
    # field of the engine -> the place of that field
    fields: Mapping[str, FieldPath] = field(default_factory=dict)

    def find(self, path: FieldPath) -> FieldPath:
        """Return the place in the request for a path of the engine."""
        if not path:
            return self.input
        name, *rest = path
        if name in _MEDIA_FIELDS:
            return self._find_item(rest)
        if name in _PROMPT_FIELDS:
            return self.input if self.prompt is None else self.prompt
        if name == "structured_outputs" and self.structured is not None:
            return self.structured
        own = self.fields.get(str(name))
        return path if own is None else (*own, *rest)

    def _find_item(self, rest: Sequence[str | int]) -> FieldPath:
        modality, index = (*rest, None, None)[:2]
        places = self.media.get(str(modality), ())
        is_known = isinstance(index, int) and 0 <= index < len(places)
        return places[index] if is_known else self.input  # type: ignore[index]


class ApiError(Exception):
    """A refusal by the HTTP layer itself. `reason` is its label in the metrics."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        reason: str | None = "bad_request",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.reason = reason
        self.headers = dict(headers or {})


class ClientGoneError(Exception):
    """The client has closed its connection, so there is no one to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorResponse:
    """An error as a client gets it, and how it is counted and logged."""

    status: int
    message: str
    param: str | None = None  # the path of the field that is wrong
    code: str | None = None
    reason: str | None = "bad_request"  # the label in the metrics; `None`: it is not counted
    missing: tuple[str, ...] | None = None  # uuids or hashes of media that must be sent
    headers: Mapping[str, str] = field(default_factory=dict)
    is_bug: bool = False  # it is written into the log

    def make_body(self) -> bytes:
        entry = {
            "message": self.message,
            "type": _get_type(self.status),
            "param": self.param,
            "code": self.code,
        }
        if self.missing is not None:
            entry["missing"] = list(self.missing)  # type: ignore[assignment]
        return msgspec.json.encode({"error": entry})

    def make_response(self) -> Response:
        return Response(
            self.make_body(), self.status, dict(self.headers), media_type="application/json"
        )


def make_error_response(error: Exception, paths: WirePaths | None = None) -> ErrorResponse:
    """Return the response for an error. `paths` are those of the request, once it was read."""
    if isinstance(error, ApiError):
        return ErrorResponse(
            status=error.status,
            message=str(error),
            param=error.param,
            code=error.code,
            reason=error.reason,
            headers=error.headers,
        )
    if isinstance(error, CapacityError):
        return _make_capacity_response(error)
    if isinstance(error, RequestError):
        return _make_request_response(error, paths)
    return ErrorResponse(status=500, message=_INTERNAL_TEXT, reason="internal", is_bug=True)


def _make_capacity_response(error: CapacityError) -> ErrorResponse:
    is_lost = isinstance(error, EngineLostError)
    reason = "draining" if isinstance(error, StoppingError) else "capacity"
    return ErrorResponse(
        status=503,
        message=str(error),
        code="engine_lost" if is_lost else "no_capacity",
        reason="engine_lost" if is_lost else reason,
        headers={"retry-after": str(error.retry_after_s)},
    )


def _make_request_response(error: RequestError, paths: WirePaths | None) -> ErrorResponse:
    if isinstance(error, FailedRequestError):
        return ErrorResponse(status=500, message=str(error), reason="internal", is_bug=True)
    path = error.path if paths is None else paths.find(error.path)
    message = describe(error.message, path if error.path else ())
    param = format_path(path) or None
    if isinstance(error, MissingMediaError):
        return ErrorResponse(
            status=409,
            message=message,
            param=param,
            code="media_not_cached",
            reason="missing_media",
            missing=error.missing,
        )
    if isinstance(error, MediaFetchError):
        return ErrorResponse(
            status=422, message=message, param=param, code="media_not_fetched", reason="media"
        )
    return ErrorResponse(status=400, message=message, param=param)


class FailureLog:
    """The one place that counts errors, logs those that are bugs, and makes their responses."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics

    def report(self, error: Exception, state: Mapping[str, Any]) -> ErrorResponse:
        """Count and log an error, and return the response for it.

        `state` is that of the HTTP request. It has `request_id` and, once the body was read, the
        `paths` of its fields.
        """
        response = make_error_response(error, state.get("paths"))
        if response.reason is not None:
            self._metrics.count_refusal(response.reason)
        if response.is_bug:
            logger.error("request %s failed", state["request_id"], exc_info=error)
        return response

    def make_reporter(self, request: Request) -> Callable[[Exception], bytes]:
        """Return a function that reports a failure after the status was sent."""
        state: Mapping[str, Any] = request.scope["state"]
        return lambda error: self.report(error, state).make_body()


def _get_type(status: int) -> str:
    """Return OpenAI's name for the kind of an error."""
    known = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
        503: "service_unavailable_error",
    }
    if status in known:
        return known[status]
    return "server_error" if status >= 500 else "invalid_request_error"


def get_phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
