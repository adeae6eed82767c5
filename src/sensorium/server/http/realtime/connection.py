"""Runs one live session over one WebSocket, with four tasks.

The reader takes the client's messages one by one, and the next one only after the session has taken
the last one; so a client that sends too fast is slowed by its own connection. The sender writes the
session's events. The guard waits until the session has reached its longest time, nothing was sent
for a while, or the server stops. The last task waits for the end of the connection, which the
reader does not see while it is busy. The first task that ends also ends the session:

  1. The client has left, or does not read: the caller closes the session, which aborts its work.
  2. Time is up, or the server stops: no more audio is taken. What was said is still transcribed and
     sent. Then the client gets an error that says why, and the close code of the `Ending`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from sensorium.server.http.connections import run_in_thread
from sensorium.server.http.errors import ApiError, FailureLog
from sensorium.server.http.realtime.dialects import (
    Append,
    Clear,
    Command,
    Commit,
    Dialect,
    Message,
    decode_message,
    get_event_id,
)
from sensorium.server.metrics.realtime import SessionClock
from sensorium.speech.live.audio import AudioDecoder
from sensorium.speech.live.session import Failed, Flushed, LiveSession
from sensorium.utils.silences import Samples

EndName = Literal["client", "unread", "idle", "expired", "draining", "internal"]
_LARGE_MESSAGE = 2**18  # characters or bytes; a larger one is read in a thread


@dataclass(frozen=True, slots=True)
class Ending:
    """A reason why a connection ends: its name in the metrics, and what the client gets."""

    name: EndName
    code: int | None = None  # of the close frame; `None`: none can be sent
    words: str = ""  # of the last error


CLIENT_LEFT = Ending("client")
UNREAD = Ending("unread")
IDLE = Ending("idle", 4000, "Nothing was sent for too long (--realtime-idle-timeout).")
EXPIRED = Ending("expired", 4001, "The session has reached its longest time. Open another one.")
DRAINING = Ending("draining", 1012, "The server is stopping. Connect again later.")
INTERNAL = Ending("internal", 1011, "The server failed. Its log has the reason.")


@dataclass(slots=True)
class Deadlines:
    """The time limits of a session, in seconds of the caller's clock; a limit of 0 is off."""

    idle_s: float
    max_s: float
    began: float
    touched: float = field(init=False)  # when something was received or sent
    num_busy: int = field(default=0, init=False)  # messages that are worked on

    def __post_init__(self) -> None:
        self.touched = self.began

    def find_ending(self, now: float) -> Ending | None:
        """Return why the session is over, or `None` if it is not."""
        if self.max_s and now - self.began >= self.max_s:
            return EXPIRED
        is_idle = self.idle_s and not self.num_busy and now - self.touched >= self.idle_s
        return IDLE if is_idle else None

    def get_pause(self, now: float) -> float | None:
        """Return the seconds until `find_ending` should be called again; `None` without limits."""
        dues = [self.began + self.max_s] * bool(self.max_s)
        if self.idle_s:
            # A busy session is checked again after a whole limit.
            dues.append((now if self.num_busy else self.touched) + self.idle_s)
        return max(0.0, min(dues) - now) if dues else None


@dataclass(slots=True, kw_only=True)
class RealtimeConnection:
    """A live session over an accepted WebSocket."""

    websocket: WebSocket
    dialect: Dialect
    session: LiveSession
    deadlines: Deadlines
    clock: SessionClock
    failures: FailureLog
    draining: asyncio.Event  # set when the server stops
    lost: asyncio.Event  # set when the connection has ended
    send_timeout_s: float | None  # for which a client may read nothing
    now: Callable[[], float] = time.monotonic
    _decoder: AudioDecoder = field(init=False)
    _sending: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _is_flushed: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._decoder = AudioDecoder(self.dialect.audio_format)

    async def run(self) -> Ending:
        """Serve the session to its end, and return why it ended; the caller closes the session."""
        reader, sender, guard, loss = tasks = tuple(
            asyncio.ensure_future(work)
            for work in (self._read(), self._write(), self._guard(), self._wait_for_loss())
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in (reader, sender, loss):
                if task.done():
                    return task.result()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await self._finish(guard.result(), sender, loss)
            return guard.result()
        except WebSocketDisconnect:
            return CLIENT_LEFT
        except TimeoutError:
            return UNREAD
        except Exception as error:  # a bug; the client gets a close code, and the log the reason
            self._report(error)
            return INTERNAL
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _finish(self, ending: Ending, *others: asyncio.Future[Ending]) -> None:
        """Transcribe what was said, and send why the session ends; raise errors of other tasks."""
        self._is_flushed.clear()
        flushing = asyncio.ensure_future(self._flush())
        try:
            tasks: tuple[asyncio.Future[Any], ...] = (*others, flushing)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            flushing.cancel()
            await asyncio.gather(flushing, return_exceptions=True)
        error = ApiError(ending.words, status=503, code=f"session_{ending.name}", reason=None)
        await self._send(self.dialect.write_error(error, None))

    async def _flush(self) -> None:
        await self.session.flush()
        await self._is_flushed.wait()

    async def _wait_for_loss(self) -> Ending:
        await self.lost.wait()
        raise WebSocketDisconnect

    # ---- the client's messages

    async def _read(self) -> Ending:
        await self._send(*self.dialect.greet())
        while True:
            await asyncio.sleep(0)  # other tasks have their turns even if many messages wait
            received = await self.websocket.receive()
            if received["type"] == "websocket.disconnect":
                return CLIENT_LEFT
            self.deadlines.touched = self.now()
            self.deadlines.num_busy += 1
            try:
                await self._handle(received.get("text"))
            finally:
                self.deadlines.num_busy -= 1
                self.deadlines.touched = self.now()

    async def _handle(self, text: str | None) -> None:
        """Carry out one message. If it is wrong, send an error; the session continues."""
        event_id: str | None = None
        is_small = text is None or len(text) <= _LARGE_MESSAGE
        try:
            if text is None:
                raise ApiError(
                    "Binary messages are not supported. Send audio as base64 in a JSON message.",
                    code="unsupported_binary",
                )
            message = (
                decode_message(text)
                if is_small
                else await run_in_thread(partial(decode_message, text))
            )
            event_id = get_event_id(message)
            read = partial(self.dialect.read, message)
            command = read() if is_small else await run_in_thread(read)
            await self._carry_out(command)
            await self._answer(*self.dialect.confirm(command))
        except (WebSocketDisconnect, TimeoutError):
            raise
        except Exception as error:  # each message has its own answer, also if it shows a bug
            await self._answer(self.dialect.write_error(self._report(error), event_id))

    async def _answer(self, *messages: Message) -> None:
        """Send messages, after the session's events for all earlier messages of the client."""
        if messages:
            await self.session.settle()
            await self._send(*messages)

    async def _carry_out(self, command: Command) -> None:
        if isinstance(command, Append):
            audio, began = command.audio, self.now()
            self.clock.count_audio(self.dialect.audio_format.count_seconds(len(audio)))
            decode = partial(self._decoder.decode, audio)
            is_small = len(audio) <= _LARGE_MESSAGE
            await self._append(decode() if is_small else await run_in_thread(decode))
            self.clock.on_chunk(self.now() - began)
        elif isinstance(command, Commit):
            # The resampler holds back the end of what was sent so far.
            await self._append(self._decoder.flush())
            await (self.session.flush() if command.is_final else self.session.commit())
        elif isinstance(command, Clear):
            self._decoder = AudioDecoder(self.dialect.audio_format)
            await self.session.clear()
        else:
            if self._decoder.form != self.dialect.audio_format:
                self._decoder = AudioDecoder(self.dialect.audio_format)
            self.session.configure(self.dialect.options)

    async def _append(self, samples: Samples) -> None:
        try:
            await self.session.append(samples)
        finally:
            self.clock.set_waiting(self.session.waiting_s)

    # ---- the session's events

    async def _write(self) -> Ending:
        async for event in self.session.get_events():
            self.clock.on_event(event)
            self.clock.set_waiting(self.session.waiting_s)
            if isinstance(event, Failed):
                error = self._report(event.error)
                messages = [self.dialect.write_failure(event.item_id, error)]
            else:
                messages = self.dialect.write(event)
            await self._send(*messages)
            self.deadlines.touched = self.now()
            if isinstance(event, Flushed):
                self._is_flushed.set()
        return INTERNAL  # the iterator is endless

    async def _send(self, *messages: Message) -> None:
        async with self._sending:
            for message in messages:
                text = msgspec.json.encode(message).decode()
                async with asyncio.timeout(self.send_timeout_s):
                    await self.websocket.send_text(text)

    async def _guard(self) -> Ending:
        """Wait until the session has to end, and return why."""
        while not self.draining.is_set():
            if ending := self.deadlines.find_ending(self.now()):
                return ending
            with suppress(TimeoutError):
                pause_s = self.deadlines.get_pause(self.now())
                await asyncio.wait_for(self.draining.wait(), pause_s)
        return DRAINING

    def _report(self, error: Exception) -> ApiError:
        code = getattr(error, "code", None)
        made = self.failures.report(error, self.websocket.scope["state"])
        made.code = made.code or code
        return made
