"""Makes Ray's HTTP proxy handle connections and request ids as `sensorium serve` does.

The proxy is a process of Ray's, which runs an ASGI application with uvicorn. Before that, it calls
`protect` if the environment variable `VARIABLE` names this function. Nothing heavy is imported
here.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS, WS_PROTOCOLS, Config

from sensorium.server.http.middleware import HEADER, choose_request_id
from sensorium.server.http.wire.descriptors import raise_file_limit
from sensorium.server.http.wire.http_protocol import LimitedHttpProtocol
from sensorium.server.http.wire.turns import Allowance
from sensorium.server.http.wire.websocket_protocol import LimitedWebSocket

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PATH = "sensorium.scale.proxy.protect"
# Messages of a WebSocket. A microphone sends fifty a second, and 64 KB, at most.
_MAX_MESSAGES = 2000
_MESSAGES_PER_S = 200
_MAX_BYTES = 2**25  # two of the largest messages
_BYTES_PER_S = 2**21
_CHOSEN = "auto"  # the name by which Ray lets uvicorn choose the classes of connections


class ProxyHttpProtocol(LimitedHttpProtocol):
    """An HTTP connection of a proxy, with the limits that a server has by default."""


class ProxyWebSocket(LimitedWebSocket):
    """A WebSocket of a proxy, which limits the rate of messages.

    The proxy keeps messages until a frontend takes them, however many they are. So each connection
    has an allowance, and is not read while the allowance is used up. Messages are not compressed,
    as in a server.
    """

    def __init__(self, config: Config, *arguments: Any, **options: Any) -> None:
        config.ws_per_message_deflate = False
        super().__init__(config, *arguments, **options)
        now = self.loop.time()
        self._messages = Allowance(_MAX_MESSAGES, per_s=_MESSAGES_PER_S, now=now)
        self._bytes = Allowance(_MAX_BYTES, per_s=_BYTES_PER_S, now=now)

    async def receive(self) -> Any:
        message = await super().receive()
        content, now = message.get("text") or message.get("bytes") or "", self.loop.time()
        wait_s = max(self._messages.take(1, now), self._bytes.take(len(content), now))
        if wait_s:
            await asyncio.sleep(wait_s)
        return message


class RequestIds:
    """ASGI middleware that gives each request one id, by the same rule as `sensorium serve`.

    Ray accepts any id of the client, and fails if that is no UTF-8.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            request_id = choose_request_id(scope)
            headers = MutableHeaders(scope=scope)
            del headers[HEADER]
            headers[HEADER] = request_id
        await self._app(scope, receive, send)


def protect() -> list[Middleware]:
    """Install our classes of connections. Ray calls this in each proxy, before its HTTP server."""
    ProxyHttpProtocol.max_connections = raise_file_limit()
    HTTP_PROTOCOLS[_CHOSEN] = f"{__name__}:{ProxyHttpProtocol.__name__}"
    WS_PROTOCOLS[_CHOSEN] = f"{__name__}:{ProxyWebSocket.__name__}"
    return [Middleware(RequestIds)]
