"""Lets in who has a key."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sensorium.server.http.errors import ApiError
from sensorium.server.http.welcome import WELCOME_PATHS

_OPEN_PATHS = WELCOME_PATHS | {"/health", "/ping", "/version"}
METRICS_PATH = "/metrics"


class Authentication:
    """`keys`: any of them will do. Some routes need none."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], protect_metrics: bool) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = _OPEN_PATHS if protect_metrics else _OPEN_PATHS | {METRICS_PATH}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_refused(scope):
            raise ApiError(
                "this server needs an API key: Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                reason="unauthorized",
                headers={"www-authenticate": "Bearer"},
            )
        await self._app(scope, receive, send)

    def _is_refused(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or scope["path"] in self._open_paths:
            return False
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() != "bearer" or not self._is_known(given.strip())

    def _is_known(self, given: str) -> bool:
        """Takes as long for a wrong key as for a right one."""
        raw = given.encode("latin-1")  # as it came; servers decode headers so
        matches = [hmac.compare_digest(raw, key) for key in self._keys]
        return any(matches)
