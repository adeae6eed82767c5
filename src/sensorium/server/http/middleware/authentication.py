"""Lets in clients that have a key, and tells them apart by it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sensorium.server.http.errors import ApiError
from sensorium.server.http.welcome.welcome import WELCOME_PATHS

_OPEN_PATHS = WELCOME_PATHS | {"/health", "/ping", "/version"}
METRICS_PATH = "/metrics"


class Authentication:
    """`keys`: any of them will do. Some routes need none.

    A request with a key has the `uuid_scope` of that key in its state: a digest, because the key
    itself is kept nowhere else. With `shares_uuids` it has none.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Sequence[str], protect_metrics: bool, shares_uuids: bool
    ) -> None:
        self._app = app
        self._scopes = {key.encode(): _make_scope(key.encode()) for key in keys}
        self._shares_uuids = shares_uuids
        self._open_paths = _OPEN_PATHS if protect_metrics else _OPEN_PATHS | {METRICS_PATH}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._let_in(scope)
        await self._app(scope, receive, send)

    def _let_in(self, scope: Scope) -> None:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        found = self._find_scope(given.strip()) if scheme.lower() == "bearer" else None
        if found is not None:
            if not self._shares_uuids:
                scope["state"]["uuid_scope"] = found
        elif scope["method"] != "OPTIONS" and scope["path"] not in self._open_paths:
            raise ApiError(
                "this server needs an API key: Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                reason="unauthorized",
                headers={"www-authenticate": "Bearer"},
            )

    def _find_scope(self, given: str) -> str | None:
        """Return the scope of a key. Takes as long for a wrong key as for a right one."""
        raw = given.encode("latin-1")  # as it came; servers decode headers so
        matches = [own for key, own in self._scopes.items() if hmac.compare_digest(raw, key)]
        return matches[0] if matches else None


def get_uuid_scope(state: Mapping[str, Any]) -> str | None:
    """Return whose uuids a request uses, by the state of its scope; `None`: those of all."""
    return state.get("uuid_scope")


def _make_scope(key: bytes) -> str:
    return hashlib.blake2b(key, digest_size=16, person=b"uuid-scope").hexdigest()
