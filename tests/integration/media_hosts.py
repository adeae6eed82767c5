"""Hosts on 127.0.0.1 with chosen behaviours, and a network in which public names lead to them.

No test connects to another address: the network's `connect` records the address that it was asked
for, and connects to the server instead.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from httpcore import AsyncNetworkStream

from sensorium.multimodal.fetching.http_client import connect_socket
from sensorium.multimodal.media import MediaLimits
from tests.support.loading import BlockingLoader

PUBLIC = "93.184.216.34"
ALSO_PUBLIC = "2606:2800:220:1:248:1893:25c8:1946"
WAIT_S = 60.0

Behaviour = Callable[["Visit"], None]


class Visit:
    """One connection to the server, after the head of its request has come."""

    def __init__(self, connection: socket.socket, head: bytes, stopping: threading.Event) -> None:
        self._connection = connection
        self.head = head
        self.stopping = stopping
        self.num_sent = 0

    def send(self, chunk: bytes) -> None:
        self._connection.sendall(chunk)
        self.num_sent += len(chunk)

    def drip(self, chunks: Iterable[bytes], pause_s: float) -> None:
        for chunk in chunks:
            if self.stopping.wait(pause_s):
                return
            self.send(chunk)

    def reset(self) -> None:
        """End the connection with RST instead of FIN."""
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


class MediaServer:
    """A server that answers each path with the behaviour that was set for it."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.visits: list[Visit] = []  # in the order of their requests
        self.greeting: Behaviour | None = None  # if set, it answers all that is sent
        self._behaviours: dict[str, Behaviour] = {}
        self._tls = tls
        self._stopping = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def on(self, path: str, behaviour: Behaviour) -> None:
        self._behaviours[path] = behaviour

    def close(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):
            connection.settimeout(WAIT_S)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            head = b""
            if self.greeting is not None:
                connection.recv(65536)
                self.greeting(Visit(connection, head, self._stopping))
            while b"\r\n\r\n" not in head and (more := connection.recv(65536)):
                head += more
            visit = Visit(connection, head, self._stopping)
            self.visits.append(visit)
            path = head.split(b" ")[1].decode() if b" " in head else ""
            self._behaviours.get(path, reply(404))(visit)
        connection.close()


class Network:
    """A network in which names have chosen addresses and every connection goes to one server."""

    def __init__(self, server: MediaServer, names: dict[str, list[Sequence[str]]]) -> None:
        self._server = server
        # host -> the answers to successive look-ups; the last one is repeated
        self._names = names
        self.looked_up: list[str] = []
        self.connected: list[tuple[str, int]] = []

    def resolve(self, host: str, port: int) -> Sequence[str]:  # noqa: ARG002
        self.looked_up.append(host)
        if host not in self._names:
            raise socket.gaierror("no such name")
        answers = self._names[host]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def connect(self, address: str, port: int, timeout_s: float) -> AsyncNetworkStream:
        self.connected.append((address, port))
        return await connect_socket("127.0.0.1", self._server.port, timeout_s)

    def loader(self, **options: object) -> BlockingLoader:
        """Return a loader on this network.

        `options` are those of `MediaLimits`, and `ssl_context`, `clock`, `shares` or
        `response_cache_bytes` of the loader.
        """
        names = ("ssl_context", "clock", "shares", "response_cache_bytes")
        own = {name: options.pop(name) for name in names if name in options}
        limits = MediaLimits(**options)  # type: ignore[arg-type]
        return BlockingLoader(limits, resolve=self.resolve, connect=self.connect, **own)  # type: ignore[arg-type]


def reply(status: int, body: bytes = b"", **headers: str) -> Behaviour:
    """Return a correct response. `headers` have `_` for `-`; an empty value removes one."""
    fields = {"Content-Length": str(len(body)), "Content-Type": "image/png"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status} Whatever", *(f"{k}: {v}" for k, v in fields.items() if v)]
    return say("\r\n".join([*lines, "", ""]).encode("latin-1") + body)


def say(answer: bytes) -> Behaviour:
    return lambda visit: visit.send(answer)


def be_silent(visit: Visit) -> None:
    """Send nothing until the server is closed."""
    visit.stopping.wait()
