"""Sends files to the routes for speech of a running server, several at a time.

The client runs in an event loop, so that an interruption ends all requests, and with them the work
of the server.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from sensorium.cli.speech.transcript_writer import AudioFile, TranscriptWriter
from sensorium.types.errors import SensoriumError

_ROUTES = {"transcribe": "/v1/audio/transcriptions", "translate": "/v1/audio/translations"}
_MAX_AT_ONCE = 8
_TIMEOUT = httpx.Timeout(60.0, read=None)  # long audio takes as long as it takes


class ServerError(SensoriumError):
    """The server can't be used for any of the files."""


class FileError(SensoriumError):
    """The server can't transcribe one of the files."""


class SpeechClient:
    """A client that transcribes files with a server. `fields` are sent in the form of each file."""

    def __init__(self, url: str, *, key: str | None, task: str, fields: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + _ROUTES[task]
        self._headers = {} if key is None else {b"Authorization": f"Bearer {key}".encode()}
        self._fields = dict(fields)
        self._is_streamed = fields["response_format"] == "text"
        if self._is_streamed:
            self._fields["stream"] = "true"

    def run(self, audios: Sequence[AudioFile], writer: TranscriptWriter) -> None:
        """Transcribe all files, and give the transcripts and the failures to `writer`.

        Raise a `ServerError` if the server does not answer, or would refuse every file.
        """
        with tqdm(total=len(audios), disable=None, unit="file") as bar:
            # Here an interruption ends a read that waits for a pipe, in the event loop it does not.
            uploads = [_prepare(audio) for audio in audios]
            asyncio.run(self._send_all(uploads, writer, bar))

    async def _send_all(
        self, uploads: Sequence[_Upload], writer: TranscriptWriter, bar: tqdm[Any]
    ) -> None:
        room = asyncio.Semaphore(_MAX_AT_ONCE)

        async def send(index: int, upload: _Upload) -> None:
            async with room:
                try:
                    await self._send(client, index, upload, writer)
                except FileError as error:
                    writer.fail(index, str(error))
                bar.update()

        async with httpx.AsyncClient(headers=self._headers, timeout=_TIMEOUT) as client:
            tasks = [asyncio.create_task(send(*entry)) for entry in enumerate(uploads)]
            try:
                await asyncio.gather(*tasks)
            finally:  # after an error or an interruption the others must not continue
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(
        self, client: httpx.AsyncClient, index: int, upload: _Upload, writer: TranscriptWriter
    ) -> None:
        content = upload.open()
        try:
            async with client.stream(
                "POST", self._url, data=self._fields, files={"file": (upload.name, content)}
            ) as response:
                await self._receive(response, index, writer)
        except httpx.InvalidURL as error:
            raise ServerError(f"{self._url} is no address of a server: {error}") from error
        except httpx.ConnectError as error:
            raise ServerError(f"the server {self._url} does not answer: {error}") from error
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise FileError(f"the connection to the server failed: {reason}") from error
        except (ValueError, LookupError, TypeError) as error:  # another kind of server
            reason = f"{type(error).__name__}: {error}"
            raise FileError(f"the server's answer can't be understood: {reason}") from error
        finally:
            if not isinstance(content, bytes):
                content.close()

    async def _receive(
        self, response: httpx.Response, index: int, writer: TranscriptWriter
    ) -> None:
        if response.status_code != httpx.codes.OK:
            raise _make_error(response.status_code, await response.aread())
        if not self._is_streamed:
            text = (await response.aread()).decode()
            writer.finish(index, text if text.endswith("\n") else f"{text}\n")
            return
        async for event in _read_events(response):
            if event["type"] == "transcript.text.delta":
                writer.add_text(index, event["delta"])
            elif event["type"] == "transcript.text.done":
                writer.finish(index, f"{event['text']}\n")
                return
        raise FileError("the server ended its answer early")


@dataclass(frozen=True, slots=True)
class _Upload:
    """A file on its way to the server."""

    name: str
    content: bytes | Path  # a path is opened when its turn comes
    problem: str = ""  # why it can't be sent

    def open(self) -> Any:
        """Return the bytes or the open file, or raise a `FileError`."""
        if self.problem:
            raise FileError(self.problem)
        if isinstance(self.content, bytes):
            return self.content
        try:
            return self.content.open("rb")
        except OSError as error:
            raise FileError(f"can't be read: {error.strerror}") from error


def _prepare(audio: AudioFile) -> _Upload:
    """Return the upload of a file. A pipe is read to its end, because its length is unknown."""
    source = audio.get_source()
    if isinstance(source, bytes):
        return _Upload("stdin", source)
    if isinstance(source, str):
        return _Upload(source, b"", "an address can't be sent to a server: fetch the file first")
    # A name may have bytes that are no text.
    name = os.fsencode(source.name).decode(errors="replace")
    try:
        return _Upload(name, source if source.is_file() else source.read_bytes())
    except OSError as error:
        return _Upload(name, b"", f"can't be read: {error.strerror}")


async def _read_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        payload = line.removeprefix("data: ")
        if payload == line or payload == "[DONE]":
            continue
        event: dict[str, Any] = json.loads(payload)
        if "error" in event:
            raise FileError(str(event["error"]["message"]))
        yield event


def _make_error(status: int, content: bytes) -> SensoriumError:
    """Return the error for a status other than 200: a `FileError` if only this file is refused."""
    message, param = f"the server answered with status {status}", None
    with suppress(ValueError, KeyError, TypeError):
        error = json.loads(content)["error"]
        message, param = str(error["message"]), error.get("param")
    is_shared = param not in (None, "file") or status in (401, 403, 404, 405)
    return ServerError(message) if is_shared else FileError(message)
