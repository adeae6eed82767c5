"""Load for servers with injected faults: clients that ask, wait, disconnect or don't read.

It also has what each client received, and what the server's processes still hold afterwards.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.support.media import make_pixels, write_image
from tests.support.server import ServerProcess
from tests.support.waiting import wait_until, wait_until_async

CHAT = "/v1/chat/completions"
WAIT_S = 120.0
# Gauges that must be 0 while there are no requests.
LIVE_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "sensorium:http_requests_in_flight",
    "sensorium:num_requests_preparing",
    "sensorium:pool_queued",
    "sensorium:pool_running",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The response that one client received."""

    status: int | None  # None: the connection broke before the status came
    text: str = ""
    error: dict[str, Any] | None = None
    is_whole: bool = False  # it ended as a response has to, with an error or without
    local_port: int | None = None

    @property
    def is_good(self) -> bool:
        return self.status == 200 and self.is_whole and self.error is None

    @property
    def is_lost_clearly(self) -> bool:
        """Whether the server reported by the status, or by an event, that the engine was lost."""
        return self.is_whole and self.error is not None and self.error["code"] == "engine_lost"


def make_image_url(seed: int, side: int = 28) -> str:
    data = write_image(make_pixels(side, side, seed=seed), "PNG")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def make_body(
    words: str,
    *images: str,
    max_tokens: int = 8,
    stream: bool = False,
    **extras: Any,
) -> dict[str, Any]:
    """Return a greedy chat request with an answer of exactly `max_tokens` tokens."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": image}} for image in images
    ]
    content = [*parts, {"type": "text", "text": words}]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": stream,
        **extras,
    }


class Client:
    """A client with a connection of its own."""

    def __init__(self, server: ServerProcess, body: dict[str, Any]) -> None:
        self._url = server.get_url(CHAT)
        self._body = body
        self.num_events = 0  # of the stream, so far
        self.local_port: int | None = None

    async def ask(self) -> Reply:
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            try:
                async with http.stream("POST", self._url, json=self._body) as response:
                    stream = response.extensions["network_stream"]
                    self.local_port = stream.get_extra_info("client_addr")[1]
                    return await self._read(response)
            except httpx.TransportError:
                return Reply(status=None, local_port=self.local_port)

    async def _read(self, response: httpx.Response) -> Reply:
        status, is_whole = response.status_code, False
        texts: list[str] = []
        error: dict[str, Any] | None = None
        try:
            if not self._body["stream"] or status != 200:
                return make_reply(status, await response.aread(), self.local_port)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_whole = True
                elif line:
                    event = json.loads(line.removeprefix("data: "))
                    self.num_events += 1
                    error = event.get("error", error)
                    texts += [c["delta"].get("content") or "" for c in event.get("choices", ())]
        except httpx.TransportError:
            is_whole = False
        return Reply(
            status=status,
            text="".join(texts),
            error=error,
            is_whole=is_whole,
            local_port=self.local_port,
        )


def make_reply(status: int, content: bytes, local_port: int | None = None) -> Reply:
    answer = json.loads(content)
    choices = answer.get("choices", ())
    return Reply(
        status=status,
        text="".join(choice["message"]["content"] for choice in choices),
        error=answer.get("error"),
        is_whole=True,
        local_port=local_port,
    )


class Crowd:
    """Clients that send their requests at the same time, inside one event loop."""

    def __init__(self, server: ServerProcess, bodies: Iterable[dict[str, Any]]) -> None:
        self.server = server
        self.clients = [Client(server, body) for body in bodies]
        self._tasks = [asyncio.create_task(client.ask()) for client in self.clients]

    async def wait_until_streaming(self) -> None:
        """Wait until every streaming client has received more than the first event."""
        streaming = [client for client in self.clients if client._body["stream"]]
        await wait_until_async(
            lambda: all(client.num_events > 1 or self._is_done(client) for client in streaming),
            "all streams have begun",
        )

    async def wait_until_running(self, num: int) -> None:
        def is_running() -> bool:
            return self.server.get_metrics()["vllm:num_requests_running"] >= num

        await asyncio.to_thread(wait_until, is_running, f"{num} requests run", WAIT_S)

    async def wait_until_taken(self) -> None:
        """Wait until each client's request runs, or has ended."""

        def is_taken() -> bool:
            # In this order: a request that ends between the two is missed, not counted twice.
            num_done = sum(task.done() for task in self._tasks)
            num_running = self.server.get_metrics()["vllm:num_requests_running"]
            return num_done + num_running >= len(self.clients)

        await asyncio.to_thread(wait_until, is_taken, "all requests are taken", WAIT_S)

    def _is_done(self, client: Client) -> bool:
        return self._tasks[self.clients.index(client)].done()

    async def finish(self) -> list[Reply]:
        async with asyncio.timeout(WAIT_S):
            return await asyncio.gather(*self._tasks)


def ask(server: ServerProcess, body: dict[str, Any]) -> Reply:
    response = server.post(CHAT, body)
    return make_reply(response.status_code, response.content)


def ask_all(server: ServerProcess, bodies: Sequence[dict[str, Any]]) -> list[Reply]:
    async def run() -> list[Reply]:
        return await Crowd(server, bodies).finish()

    return asyncio.run(run())


async def open_raw(
    server: ServerProcess, body: bytes, *, announced: int | None = None, **options: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection and send a request; `announced` replaces the true content length."""
    address = urlsplit(server.get_url())
    reader, writer = await asyncio.open_connection(address.hostname, address.port, **options)
    length = len(body) if announced is None else announced
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


# ---- what is left afterwards


def get_live(server: ServerProcess) -> dict[str, float]:
    metrics = server.get_metrics()
    live = {name: metrics[name] for name in LIVE_GAUGES if metrics[name]}
    used = metrics["sensorium:encoder_cache_used_embeds"]
    held = used - metrics["sensorium:encoder_cache_evictable_embeds"]
    return live | ({"encoder references": held} if held else {})


def wait_until_idle(server: ServerProcess) -> None:
    last: dict[str, float] = {}

    def is_idle() -> bool:
        nonlocal last
        last = get_live(server)
        return not last

    try:
        wait_until(is_idle, "nothing is left", WAIT_S)
    except AssertionError as error:
        raise AssertionError(f"left behind: {last}\n{server.output[-3000:]}") from error


def check_counters_never_fall(before: Mapping[str, float], after: Mapping[str, float]) -> None:
    endings = ("_total", "_count", "_sum", "_bucket")
    for name, value in before.items():
        if name.partition("{")[0].endswith(endings):
            assert after[name] >= value, name


def count_open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def count_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def wait_until_files_are(pid: int, num: int) -> None:
    """Wait until a process has at most `num` open files; closed connections take a moment."""
    last = 0

    def is_back() -> bool:
        nonlocal last
        last = count_open_files(pid)
        return last <= num

    try:
        wait_until(is_back, "its files are closed", 30.0)
    except AssertionError as error:
        names = sorted(_read_links(pid))
        raise AssertionError(f"{last} files are open, {num} were: {names}") from error


def _read_links(pid: int) -> list[str]:
    links: list[str] = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue
    return links


def has_connection(pid: int, server_port: int, client_port: int) -> bool:
    """Return whether the server's end of this connection is among the process's files."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        local, remote = (int(word.rpartition(":")[2], 16) for word in words[1:3])
        if (local, remote) == (server_port, client_port):
            return f"socket:[{words[9]}]" in _read_links(pid)
    return False
