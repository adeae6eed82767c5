"""Processes that send prepared requests to a server, and what they see of its answers.

A client is one process with one event loop. It makes the bodies of its part of a load while no
clock runs, keeps them, and sends the same bytes to one server after another. It takes answers as
raw bytes and reads them once they are complete, except for the first text, so that the clients take
a small part of the machine.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from server_loads import Batch, get_content_type

_ANSWER_S = 600.0
_FIRST_TEXT = re.compile(rb'"content": ?"[^"]')
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)")
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class AnswerError(Exception):
    """A request was not answered as it should have been."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a client sees of one answer. Tokens are as the server counts them, if it does."""

    index: int
    first_s: float  # to the first text of a stream
    total_s: float
    num_prompt_tokens: int | None
    num_tokens: int | None
    text: str = ""  # of a transcript


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a client saw of its part of a load. Times are of the clock all processes share."""

    start: float
    end: float
    busy_s: float  # of a processor
    answers: list[Answer]


class Connection:
    """A connection that is kept for the next request, as a client library keeps it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, index: int, path: str, body: bytes) -> Answer:
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: {get_content_type(path)}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        began = time.monotonic()
        if self._reader is None or self._writer is None:
            opened = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
            self._reader, self._writer = opened
        self._writer.write(head.encode())
        self._writer.write(body)
        await self._writer.drain()
        found = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length, first = _LENGTH.search(found), None
        if length is not None:
            content = await self._reader.readexactly(int(length[1]))
        else:
            content, first = await self._read_chunks(self._reader)
        ended = time.monotonic()
        if not re.match(rb"http/1.1 200", found):
            raise AnswerError(f"{path}: {found.splitlines()[0].decode()}: {content[:300]!r}")
        if b"\r\nconnection: close" in found:
            self.close()
        seen = read_stream(content) if length is None else read_transcript(content)
        return Answer(index=index, first_s=(first or ended) - began, total_s=ended - began, **seen)

    async def _read_chunks(self, reader: asyncio.StreamReader) -> tuple[bytes, float | None]:
        """Return the content, and when its first text was there."""
        raw, first, looked = bytearray(b"\r\n"), None, 0
        while not raw.endswith(_LAST_CHUNK):
            received = await reader.read(1 << 16)
            if not received:
                raise AnswerError(f"the answer breaks off: {bytes(raw[-300:])!r}")
            raw += received
            if first is None:
                if _FIRST_TEXT.search(raw, looked) is not None:
                    first = time.monotonic()
                looked = max(0, len(raw) - 16)  # what is looked for may be cut
        return _join_chunks(bytes(raw[2:])), first

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


def _join_chunks(raw: bytes) -> bytes:
    parts: list[bytes] = []
    place = 0
    while True:
        line_end = raw.index(b"\r\n", place)
        size = int(raw[place:line_end].split(b";")[0], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(raw[line_end + 2 : line_end + 2 + size])
        place = line_end + 2 + size + 2


def read_stream(content: bytes) -> dict[str, Any]:
    """Return the numbers of tokens of a chat, which stand in one of its last events."""
    for line in reversed(content.splitlines()):
        if line.startswith(b"data: {"):
            usage = json.loads(line.removeprefix(b"data: ")).get("usage")
            if not usage:
                break
            return {
                "num_prompt_tokens": usage["prompt_tokens"],
                "num_tokens": usage["completion_tokens"],
            }
    raise AnswerError(f"the stream ends without its usage: {content[-300:]!r}")


def read_transcript(content: bytes) -> dict[str, Any]:
    """Return the text of a transcript, and its numbers of tokens if they are in the answer."""
    answer = json.loads(content)
    if "text" not in answer:
        raise AnswerError(f"this is no transcript: {content[:300]!r}")
    usage = answer.get("usage") or {}
    return {
        "text": answer["text"].strip(),
        "num_prompt_tokens": usage.get("input_tokens"),
        "num_tokens": usage.get("output_tokens"),
    }


async def send(url: str, path: str, bodies: dict[int, bytes], num_at_once: int) -> list[Answer]:
    """Send all requests, so many at a time, and return the answers as they came."""
    waiting = deque(bodies.items())
    answers: list[Answer] = []

    async def work() -> None:
        connection = Connection(url)
        try:
            while waiting:
                index, body = waiting.popleft()
                async with asyncio.timeout(_ANSWER_S):
                    answers.append(await connection.ask(index, path, body))
        finally:
            connection.close()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(work())
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        words = "" if isinstance(first, AnswerError) else f"{type(first).__name__}: "
        raise AnswerError(f"{url}: {words}{first}") from first
    return answers


# ---- processes


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The part of a load for which a client makes the bodies."""

    batch: Batch
    indices: list[int]
    has_first_bodies: bool


@dataclass(frozen=True, kw_only=True)
class Sending:
    """A server that a client sends its bodies to, or those from before the clock runs."""

    url: str
    num_at_once: int
    are_first_bodies: bool = False


class Client:
    """What a client process keeps: the bodies of its part of the present load."""

    def __init__(self) -> None:
        self._path = ""
        self._bodies: dict[int, bytes] = {}
        self._first_bodies: dict[int, bytes] = {}

    def prepare(self, task: Preparation) -> None:
        batch = task.batch
        self._path = batch.load.path
        self._bodies = {index: batch.make_body(index) for index in task.indices}
        first = batch.make_first_bodies() if task.has_first_bodies else []
        self._first_bodies = dict(enumerate(first))

    def send(self, task: Sending) -> Part:
        bodies = self._first_bodies if task.are_first_bodies else self._bodies
        busy, start = time.process_time(), time.monotonic()
        answers = asyncio.run(send(task.url, self._path, bodies, task.num_at_once))
        return Part(
            start=start,
            end=time.monotonic(),
            busy_s=time.process_time() - busy,
            answers=answers,
        )


def _run_client(pipe: Pipe) -> None:
    """Do what comes through the pipe until it is closed; what fails goes back in words."""
    client = Client()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            if isinstance(task, Preparation):
                client.prepare(task)
                pipe.send(None)
            else:
                pipe.send(client.send(task))
        except Exception as error:
            pipe.send(str(error) or repr(error))


class Clients:
    """Client processes, which are started once and carry one load after another."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        self._processes = []
        self._used: list[Pipe] = []  # those with a part of the present load
        self._num_at_once = 0
        for _ in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_client, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def prepare(self, batch: Batch) -> None:
        """Have the bodies of a load made, each by the process that will send it."""
        load = batch.load
        self._num_at_once = load.num_at_once
        self._used = self._pipes[: min(load.num_at_once, load.num_requests)]
        number = len(self._used)
        self._call(
            lambda place: Preparation(
                batch=batch,
                indices=list(range(place, load.num_requests, number)),
                has_first_bodies=load.are_known and place == 0,
            )
        )

    def send_first(self, url: str) -> None:
        """Send what the server has to know before the clock runs."""
        self._call(lambda _: Sending(url=url, num_at_once=1, are_first_bodies=True))

    def send(self, url: str) -> list[Part]:
        share, rest = divmod(self._num_at_once, len(self._used))
        parts: list[Part] = self._call(
            lambda place: Sending(url=url, num_at_once=share + (place < rest))
        )
        return parts

    def _call(self, make_task: Callable[[int], Any]) -> list[Any]:
        for place, pipe in enumerate(self._used):
            pipe.send(make_task(place))
        results = [pipe.recv() for pipe in self._used]
        failures = [result for result in results if isinstance(result, str)]
        if failures:
            raise AnswerError(failures[0])
        return results

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.kill()


def ask_in_turn(url: str, requests: list[tuple[int, str, bytes]]) -> list[Answer]:
    """Send one request after another from this process, and return their answers in order."""

    async def ask_all() -> list[Answer]:
        answers = []
        for index, path, body in requests:
            answers += await send(url, path, {index: body}, 1)
        return answers

    return asyncio.run(ask_all())
