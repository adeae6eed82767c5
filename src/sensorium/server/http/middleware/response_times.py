"""Counts responses by route and status, with the time from arrival to the last byte."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sensorium.server.metrics.frontend import FrontendMetrics

_NO_ROUTE = "none"  # what no route takes must not become a series of its own
_METHODS = frozenset({"GET", "POST", "OPTIONS", "HEAD", "PUT", "PATCH", "DELETE"})


class ResponseTimes:
    """A request whose client left before it was answered has no status, and is not counted."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def observe_end(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status is not None and not message.get("more_body", False):
                self._observe(scope, status)
            await send(message)

        await self._app(scope, receive, observe_end)

    def _observe(self, scope: Scope, status: int) -> None:
        route = scope.get("route")
        self._metrics.observe_response(
            handler=_NO_ROUTE if route is None else route.path,
            method=scope["method"] if scope["method"] in _METHODS else "other",
            status=status,
            seconds=time.monotonic() - scope["state"]["arrived"],
        )
