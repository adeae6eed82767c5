"""Sends the audio of a pipe to `/v1/realtime` of a running server, and prints words as they come.

Each turn that the server finds is a line. The server takes audio as fast as it can transcribe it,
so a file is sent faster than a microphone.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from sensorium.cli.speech.speech_client import ServerError

_ROUTE = "/v1/realtime?intent=transcription"
_FORMAT = {"type": "audio/pcm", "rate": 16_000}
_CHUNK_BYTES = 3200  # 100 ms
_OPEN_TIMEOUT_S = 60.0
_LAST = "last"  # the id of the commit after the last audio
_EMPTY = "input_audio_buffer_commit_empty"
_TRANSCRIPTION = "conversation.item.input_audio_transcription"


class LiveClient:
    """A client that transcribes streaming audio; `fields` are the session's `transcription`."""

    def __init__(self, url: str, *, key: str | None, fields: Mapping[str, Any]) -> None:
        base = url.rstrip("/").removesuffix("/v1").replace("http", "ws", 1)
        model = f"&model={quote(fields['model'])}" if "model" in fields else ""
        self._url = f"{base}{_ROUTE}{model}"
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._fields = dict(fields)
        self._open_items: set[str] = set()  # that were committed, and are not transcribed yet
        self._is_sent = False  # all audio was sent, and the last of it is committed
        self._num_failed = 0

    def run(self, descriptor: int) -> int:
        """Transcribe PCM16 at 16 kHz from a file or a pipe, and return how many turns failed.

        Raise a `ServerError` if the server does not answer, or ends the session.
        """
        return asyncio.run(self._run(descriptor))

    async def _run(self, descriptor: int) -> int:
        try:
            async with connect(
                self._url,
                additional_headers=self._headers,
                open_timeout=_OPEN_TIMEOUT_S,
                compression=None,
                ping_timeout=None,  # its answer waits behind the audio that the server has not read
            ) as socket:
                try:
                    await self._talk(socket, descriptor)
                except BaseException:
                    # The server would answer a closing handshake behind all audio that it has not
                    # read, and an interruption would wait for it.
                    socket.transport.abort()
                    raise
        except InvalidStatus as error:
            raise ServerError(_get_message(error)) from error
        except ConnectionClosed as error:
            why = "without a reason" if error.rcvd is None else f"with {error.rcvd}"
            raise ServerError(f"the server ended the session {why}") from error
        except (OSError, InvalidHandshake, TimeoutError) as error:
            raise ServerError(f"the server {self._url} does not answer: {error}") from error
        return self._num_failed

    async def _talk(self, socket: ClientConnection, descriptor: int) -> None:
        audio = {"input": {"format": _FORMAT, "transcription": self._fields}}
        session = {"type": "transcription", "audio": audio}
        await _send(socket, "session.update", session=session)
        sender = asyncio.create_task(self._send_audio(socket, descriptor))
        receiver = asyncio.create_task(self._receive(socket))
        try:
            # The sender ends first, as a rule. If it fails, nothing more would come.
            await asyncio.wait({sender, receiver}, return_when=asyncio.FIRST_EXCEPTION)
            for task in (sender, receiver):
                if task.done():
                    task.result()
        finally:
            receiver.cancel()
            sender.cancel()
            await asyncio.gather(sender, receiver, return_exceptions=True)

    async def _receive(self, socket: ClientConnection) -> None:
        while not (self._is_sent and not self._open_items):
            self._take(json.loads(await socket.recv()))

    async def _send_audio(self, socket: ClientConnection, descriptor: int) -> None:
        with suppress(ConnectionClosed):  # the receiver also gets it, and says why
            async for chunk in _read_chunks(descriptor):
                text = base64.b64encode(chunk).decode()
                await _send(socket, "input_audio_buffer.append", audio=text)
            await _send(socket, "input_audio_buffer.commit", event_id=_LAST)
            await _send(socket, "input_audio_buffer.commit", event_id=_LAST)

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind == "input_audio_buffer.committed":
            self._open_items.add(event["item_id"])
        elif kind == f"{_TRANSCRIPTION}.delta":
            print(event["delta"], end="", flush=True)
        elif kind == f"{_TRANSCRIPTION}.completed":
            self._open_items.discard(event["item_id"])
            print("\n" * bool(event["transcript"]), end="", flush=True)
        elif kind == f"{_TRANSCRIPTION}.failed":
            self._open_items.discard(event["item_id"])
            self._num_failed += 1
            print(f"sensorium: {event['error']['message']}", file=sys.stderr)
        elif kind == "error":
            error = event["error"]
            # The second commit always finds nothing, and is answered after the first one.
            if error.get("event_id") == _LAST and error["code"] == _EMPTY:
                self._is_sent = True
            else:
                raise ServerError(error["message"])


async def _read_chunks(descriptor: int) -> AsyncIterator[bytes]:
    """Yield the bytes of a file or a pipe. Waiting for a pipe can be interrupted."""
    mode = os.fstat(descriptor).st_mode
    # Other kinds, such as files and /dev/null, are always ready, and can't be waited for.
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)):
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            yield chunk
        return
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(descriptor), "rb")
    )
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            yield chunk
    finally:
        transport.close()


async def _send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


def _get_message(error: InvalidStatus) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(error.response.body)["error"]["message"])
    return f"the server answered with status {error.response.status_code}"
