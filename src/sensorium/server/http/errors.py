"""Turns errors into responses with a status and OpenAI's error object, and counts and logs them.

An error of the engine names a field by the engine's own name: `multi_modal_data.image[1]` is the
second image of a prompt. `WirePaths` translates that to the field of the client's request, which
depends on the route and on the way in which the client asked for structured output. Fields of a
conversation have the same names in the engine and in the request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from sensorium.server.http.protocol.answers import ErrorBody, ErrorResponse
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
    UnknownFieldError,
    describe,
    format_path,
)

_MEDIA_FIELDS = ("multi_modal_data", "multi_modal_uuids")
_PROMPT_FIELDS = ("prompt", "prompt_token_ids")
logger = logging.getLogger(__name__)
RETRY_AFTER_S = 1
_INTERNAL_TEXT = "the server failed; its log has the reason, together with this request's id"
# status -> OpenAI's name for the kind of an error
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WirePaths:
    """A translation of the engine's field names to the paths of fields in a client's request.

    It is kept until the request ends, so it holds only paths and no media.
    """

    # The field with the model's input. An error that names no field is reported for this one.
    input: FieldPath
    # The field with the text or the tokens of the prompt, if it is not `input`.
    prompt: FieldPath | None = None
    # modality -> the paths of its media items, in their order
    media: Mapping[str, Sequence[FieldPath]] = field(default_factory=dict)
    # The field that constrains the answer, if it isn't `structured_outputs`.
    structured: FieldPath | None = None
    # name of a field of the engine -> its path in the request
    fields: Mapping[str, FieldPath] = field(default_factory=dict)

    def find(self, path: FieldPath) -> FieldPath:
        """Return the path in the client's request for the path in an error of the engine.

        An empty path stands for the model's input. A path without a translation is returned
        unchanged.
        """
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
        if isinstance(index, int) and 0 <= index < len(places):
            return places[index]
        return self.input


@dataclass(eq=False)
class ApiError(Exception):
    """An exception with the error response for the client; other exceptions are converted to it."""

    message: str
    _: KW_ONLY
    status: int = 400
    param: str | None = None  # the path of the field that is wrong
    code: str | None = None
    reason: str | None = "bad_request"  # the label in the metrics; `None`: not counted
    missing: tuple[str, ...] | None = None  # uuids or hashes of media that must be sent
    headers: Mapping[str, str] = field(default_factory=dict)
    is_bug: bool = False  # the log gets it, with its traceback

    def make_body(self) -> bytes:
        return msgspec.json.encode(ErrorResponse(error=self._make_details()))

    def make_object(self) -> dict[str, Any]:
        """Return OpenAI's error object, for a message that has it among other fields."""
        found: dict[str, Any] = msgspec.to_builtins(self._make_details())
        return found

    def _make_details(self) -> ErrorBody:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return ErrorBody(
            message=self.message,
            type=_TYPES.get(self.status, default),
            param=self.param,
            code=self.code,
            missing=UNSET if self.missing is None else list(self.missing),
        )

    def make_response(self) -> Response:
        return Response(
            self.make_body(), self.status, dict(self.headers), media_type="application/json"
        )


class ClientGoneError(Exception):
    """An exception that means that the client has left, so no response can be sent any more."""


def _make_api_error(error: Exception, paths: WirePaths | None) -> ApiError:
    """Return the error for the client; `paths` is `None` until the request's body was read."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CapacityError):
        return _make_capacity_error(error)
    if isinstance(error, FailedRequestError):
        return ApiError(str(error), status=500, reason="internal", is_bug=True)
    if isinstance(error, RequestError):
        return _make_request_error(error, paths)
    return ApiError(_INTERNAL_TEXT, status=500, reason="internal", is_bug=True)


def _make_capacity_error(error: CapacityError) -> ApiError:
    is_lost = isinstance(error, EngineLostError)
    reason = "draining" if isinstance(error, StoppingError) else "capacity"
    return ApiError(
        str(error),
        status=503,
        code="engine_lost" if is_lost else "no_capacity",
        reason="engine_lost" if is_lost else reason,
        headers={"retry-after": str(error.retry_after_s)},
    )


def _make_request_error(error: RequestError, paths: WirePaths | None) -> ApiError:
    path = error.path if paths is None else paths.find(error.path)
    made = ApiError(
        describe(error.message, path if error.path else ()), param=format_path(path) or None
    )
    if isinstance(error, MissingMediaError):
        made.status, made.code, made.reason = 409, "media_not_cached", "missing_media"
        made.missing = error.missing
    elif isinstance(error, MediaFetchError):
        made.status, made.code, made.reason = 422, "media_not_fetched", "media"
    elif isinstance(error, UnknownFieldError):
        made.code = "unknown_parameter"  # as in OpenAI's API
    return made


@dataclass(frozen=True, slots=True)
class FailureLog:
    """A reporter of failed requests, which counts them by reason and logs those that are bugs."""

    metrics: FrontendMetrics

    def report(self, error: Exception, state: Mapping[str, Any]) -> ApiError:
        """Count an exception, log it if it is a bug, and return the `ApiError` for the client.

        `state` is the request's ASGI state: `request_id` and, once the body was read, `paths`.
        """
        made = _make_api_error(error, state.get("paths"))
        if made.reason is not None:
            self.metrics.count_refusal(made.reason)
        if made.is_bug:
            logger.error("request %s failed", state["request_id"], exc_info=error)
        return made
