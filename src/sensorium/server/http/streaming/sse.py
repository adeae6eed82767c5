"""Server-sent events: frames, and the response that sends them.

The status goes out with the first frame: what fails before it is answered as an error; what fails
later is a frame with the error, and the end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sensorium.server.http.connections.disconnect import run_until_disconnect

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def make_frame(value: Any) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


class EventStream(Response):
    """`frames` is closed in every case. `make_error_body` says what a late failure looks like."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        make_error_body: Callable[[Exception], bytes],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._make_error_body = make_error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await run_until_disconnect(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        frames = self._frames
        try:
            frame = await anext(frames)
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await _send_body(send, frame)
            await self._send_rest(send)
        finally:
            await frames.aclose()

    async def _send_rest(self, send: Send) -> None:
        try:
            async for frame in self._frames:
                await _send_body(send, frame)
        except Exception as error:  # the status is out: whatever it is, the client is told here
            await _send_body(send, b"data: " + self._make_error_body(error) + b"\n\n")
        await _send_body(send, DONE, more_body=False)


async def _send_body(send: Send, body: bytes, *, more_body: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more_body})
