"""The HTTP application of a frontend, where it differs from that of a server."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from sensorium.scale.ingress import BehindProxy


def test_the_id_of_a_request_is_left_to_the_proxy_and_its_path_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[Message] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/plain"), (b"x-request-id", b"mine")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x-request-id"})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "client": ("127.0.0.1", 80)}
    with caplog.at_level("INFO", "uvicorn.access"):
        asyncio.run(BehindProxy(app)(scope, receive, send))
    assert caplog.messages == ['127.0.0.1:80 - "GET /v1/models HTTP/1.1" 200']
    start, body = sent
    assert start["headers"] == [(b"content-type", b"text/plain")]
    assert body["body"] == b"x-request-id"
