"""Responds to a request that generates text: with a whole answer, or with server-sent events.

The status is sent with the first event. A failure before it gets an error status; a later one
becomes an event with the error, which ends the stream. Chunks come first, then the token counts and
the trace (a report of where time went) if the request asked for them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sensorium.server.http.bodies.reading import make_response
from sensorium.server.http.calls import Call
from sensorium.server.http.connections import run_until_disconnect
from sensorium.server.http.errors import FailureLog
from sensorium.server.http.protocol.answers import Envelope, Usage
from sensorium.server.http.protocol.requests import StreamOptions
from sensorium.server.http.usage import count_usage, make_usage
from sensorium.types.outputs import RequestDelta, RequestOutput

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()
_Chunk = TypeVar("_Chunk", bound=Envelope)


class AnswerMaker(Protocol[_Chunk]):
    """A builder of the response to one request, which keeps its state from chunk to chunk."""

    def make_answer(self, outputs: Sequence[RequestOutput]) -> Envelope: ...

    def make_chunks(self, prompt_index: int, delta: RequestDelta, /) -> list[_Chunk]: ...

    def make_empty_chunk(self) -> _Chunk: ...


async def answer_call(
    http_request: Request, call: Call[Any], maker: AnswerMaker[_Chunk], *, is_msgpack: bool = False
) -> Response:
    """Run a call, and return the HTTP response: its whole answer, or a stream if one is asked for.

    A stream runs the call while it is sent. Raise a `ClientGoneError` if the client leaves before
    the whole answer is complete.
    """
    if call.request.stream:
        return EventStream(_SseChunks(call, maker).run(), call.context.failures)
    outputs = await run_until_disconnect(http_request.receive, call.finish())
    return make_response(maker.make_answer(outputs), is_msgpack=is_msgpack)


class _SseChunks:
    """A producer of the server-sent events of one streamed response, except the final `[DONE]`."""

    def __init__(self, call: Call[Any], maker: AnswerMaker[Any]) -> None:
        options = call.request.stream_options or StreamOptions()
        self._call = call
        self._maker = maker
        self._has_usage = bool(options.include_usage)
        self._is_continuous = self._has_usage and bool(options.continuous_usage_stats)
        # index of a prompt that has begun -> its length
        self._num_prompt_tokens: dict[int, int] = {}
        self._num_completion_tokens = 0

    async def run(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._call.run()) as deltas:
            async for prompt_index, delta in deltas:
                self._num_prompt_tokens[prompt_index] = len(delta.prompt_token_ids)
                self._num_completion_tokens += sum(len(entry.token_ids) for entry in delta.deltas)
                for chunk in self._add_trace(self._maker.make_chunks(prompt_index, delta)):
                    yield make_event(msgspec.structs.replace(chunk, usage=self._get_usage()))
        if self._has_usage:
            last = msgspec.structs.replace(
                self._maker.make_empty_chunk(),
                usage=make_usage(self._call.get_outputs()),
                sensorium_trace=self._call.get_trace(),
            )
            yield make_event(last)

    def _get_usage(self) -> Usage | UnsetType | None:
        if self._is_continuous:
            return count_usage(sum(self._num_prompt_tokens.values()), self._num_completion_tokens)
        return None if self._has_usage else UNSET

    def _add_trace(self, chunks: list[Any]) -> list[Any]:
        """Return the chunks, with the trace in the last one if it is the last of the stream.

        If a chunk with the token counts follows, that one has the trace. If `chunks` is empty, an
        empty chunk is added for the trace.
        """
        if not self._call.is_ended or self._has_usage or not self._call.has_trace:
            return chunks
        *before, last = chunks or [self._maker.make_empty_chunk()]
        return [*before, msgspec.structs.replace(last, sensorium_trace=self._call.get_trace())]


def make_event(value: Any) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


class EventStream(Response):
    """A response that sends the server-sent events of a generator, and then `[DONE]`.

    The generator is closed in every case, also if the client leaves.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], failures: FailureLog) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._failures = failures  # for a failure after the first event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(receive, self._run(scope, send))

    async def _run(self, scope: Scope, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        async with aclosing(self._events) as events:
            event = await anext(events)
            await send({"type": "http.response.start", **start})
            await _send_body(send, event)
            try:
                async for event in events:
                    await _send_body(send, event)
            except Exception as error:  # the status is sent, so every error becomes an event
                body = self._failures.report(error, scope["state"]).make_body()
                await _send_body(send, b"data: " + body + b"\n\n")
            await _send_body(send, DONE, more_body=False)


async def _send_body(send: Send, body: bytes, *, more_body: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more_body})
