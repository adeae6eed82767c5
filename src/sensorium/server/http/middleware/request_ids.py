"""Gives every request an id, which its response carries, and the time of its arrival."""

from __future__ import annotations

import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
WARNING_HEADER = "x-sensorium-warning"  # a field of the request that is probably misspelt
_MAX_LENGTH = 128


class RequestIds:
    """A client's own id is kept if it is short and printable."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _is_sane(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["arrived"] = time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                if "warning" in state:
                    headers[WARNING_HEADER] = state["warning"]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _is_sane(text: str) -> bool:
    return 0 < len(text) <= _MAX_LENGTH and all(" " <= character <= "~" for character in text)
