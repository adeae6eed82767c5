"""How many requests for text or tokens may be in the server at once: counted from the moment when
the body is there to the last byte of the answer. A body that never ends takes no place.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from sensorium.server.http.errors import RETRY_AFTER_S, ApiError
from sensorium.server.metrics.frontend import FrontendMetrics


def get_limit(max_concurrent_requests: int, api_server_count: int) -> int:
    """One frontend's share, rounded up."""
    return -(-max_concurrent_requests // api_server_count)


class Admission:
    """Owns the count. All on one event loop. A request is counted when its route calls
    `request.state.admit()`, which raises an `ApiError` if there is no room.
    """

    def __init__(
        self, app: ASGIApp, *, paths: Container[str], limit: int, metrics: FrontendMetrics
    ) -> None:
        self._app = app
        self._paths = paths  # those of routes with work that is not done at once
        self._limit = limit
        self._metrics = metrics
        self._num_admitted = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_generating = scope["type"] == "http" and scope["path"] in self._paths
        if not is_generating or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._check()  # a large body is not received only to be refused
        with self._metrics.track_arrival(), ExitStack() as held:
            scope["state"]["admit"] = lambda: held.enter_context(self._admit())
            await self._app(scope, receive, send)

    @contextmanager
    def _admit(self) -> Iterator[None]:
        self._check()
        self._num_admitted += 1
        try:
            yield
        finally:
            self._num_admitted -= 1

    def _check(self) -> None:
        if self._num_admitted >= self._limit:
            raise ApiError(
                f"Too many concurrent requests (limit {self._limit}). Retry later.",
                status=429,
                code="too_many_requests",
                reason="capacity",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )
