"""How many requests for text or tokens may be in the server at once: counted from arrival, before
the body is read, to the last byte of the answer.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from sensorium.server.http.errors import RETRY_AFTER_S, ApiError
from sensorium.server.metrics.frontend import FrontendMetrics

# Those whose work is not done at once.
GENERATING_PATHS = frozenset(
    {
        "/inference/v1/generate",
        "/v1/chat/completions",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/detokenize",
        "/tokenize",
    }
)


def get_limit(max_concurrent_requests: int, api_server_count: int) -> int:
    """One frontend's share, rounded up."""
    return -(-max_concurrent_requests // api_server_count)


class Admission:
    """Owns the count. All on one event loop."""

    def __init__(self, app: ASGIApp, *, limit: int, metrics: FrontendMetrics) -> None:
        self._app = app
        self._limit = limit
        self._metrics = metrics
        self._num_admitted = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_generating = scope["type"] == "http" and scope["path"] in GENERATING_PATHS
        if not is_generating or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._num_admitted >= self._limit:
            raise ApiError(
                f"as many requests are being served as may be ({self._limit}): try again",
                status=429,
                code="too_many_requests",
                reason="capacity",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )
        self._num_admitted += 1
        try:
            with self._metrics.track_arrival():
                await self._app(scope, receive, send)
        finally:
            self._num_admitted -= 1
