"""Error responses that a connection sends itself, when no handler can respond."""

from __future__ import annotations

from http import HTTPStatus

from sensorium.server.http.errors import RETRY_AFTER_S, ApiError

# The size is checked after each portion that is parsed, so headers may be larger by one portion.
MAX_HEAD_BYTES = 2**16


def make_response(error: ApiError) -> bytes:
    """Return the bytes of an HTTP response with this error, after which the server hangs up."""
    body = error.make_body()
    headers = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"{headers}connection: close\r\n\r\n"
    )
    return head.encode() + body


def make_handshake_refusal(rule: str, *, status: int = 400) -> bytes:
    """Return the response to a WebSocket handshake that breaks a rule, which `rule` states."""
    code = "invalid_handshake" if status == HTTPStatus.BAD_REQUEST else "headers_too_large"
    words = f"This handshake of a WebSocket can't be taken: {rule}."
    return make_response(ApiError(words, status=status, code=code))


INVALID = make_response(ApiError("This is no valid HTTP request.", code="invalid_http"))
TOO_LARGE = make_response(
    ApiError(
        f"the headers may have {MAX_HEAD_BYTES} bytes at most", status=431, code="headers_too_large"
    )
)
TOO_SLOW = make_response(
    ApiError("The headers came too slowly. Send the request again.", status=408, code="timeout")
)
TOO_MANY = make_response(
    ApiError(
        "This server has too many open connections. Retry later.",
        status=503,
        code="too_many_connections",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )
)
