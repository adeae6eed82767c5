"""From what went wrong to what the client is told: a status, and OpenAI's error object."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec
from starlette.responses import Response

from sensorium.server.http.input_paths import MEDIA_LABEL
from sensorium.types.errors import (
    CapacityError,
    EngineLostError,
    FailedRequestError,
    MediaFetchError,
    MissingMediaError,
    RequestError,
)

RETRY_AFTER_S = 1
# A field's path at the beginning of a text: messages[0].content[1].image_url.url
_PATH = re.compile(r"[a-z_]+(?:\[\d+\]|\.[A-Za-z_]+)*(?=[ :])")
_PROMPT_FIELD = re.compile(r"prompt field '(\w+)'")
_INTERNAL_TEXT = "the server failed; its log has the reason under this request's id"


class ApiError(Exception):
    """What the HTTP layer itself refuses. `reason` is what the metrics call it."""

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
    """The client has closed its connection: there is nobody to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorResponse:
    """`reason`: as the metrics call it (`None`: nothing was refused). `is_bug`: the log has to have
    it.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    reason: str | None = "bad_request"
    missing: tuple[str, ...] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_bug: bool = False

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


def make_answer(error: Exception, *, fields: frozenset[str] = frozenset()) -> ErrorResponse:
    """`fields` are the names of the request's fields: texts that begin with one name it."""
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
        return _make_capacity_answer(error)
    if isinstance(error, RequestError):
        return _make_request_answer(error, fields)
    return ErrorResponse(status=500, message=_INTERNAL_TEXT, reason="internal", is_bug=True)


def _make_capacity_answer(error: CapacityError) -> ErrorResponse:
    is_lost = isinstance(error, EngineLostError)
    return ErrorResponse(
        status=503,
        message=str(error),
        code="engine_lost" if is_lost else "no_capacity",
        reason="engine_lost" if is_lost else "capacity",
        headers={"retry-after": str(error.retry_after_s)},
    )


def _make_request_answer(error: RequestError, fields: frozenset[str]) -> ErrorResponse:
    message = str(error)
    param = find_param(message, fields)
    if isinstance(error, FailedRequestError):
        return ErrorResponse(status=500, message=message, reason="internal", is_bug=True)
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


def find_param(message: str, fields: frozenset[str]) -> str | None:
    """The field that a text speaks of, if it begins with one."""
    named = _PROMPT_FIELD.match(message)
    if named is not None:
        return named.group(1)
    found = _PATH.match(message)
    if found is None or MEDIA_LABEL.match(message):
        return None
    path = found.group()
    return path if re.split(r"[.\[]", path, maxsplit=1)[0] in fields else None


def _get_type(status: int) -> str:
    """As OpenAI calls them."""
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
