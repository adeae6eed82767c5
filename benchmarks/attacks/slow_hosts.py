"""Attack 11: pictures at addresses of hosts that accept every request and answer none.

A server that fetches in threads has none left for others when as many hosts are slow as it has
threads. The hosts are on this machine, so the server must be allowed to ask private addresses.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from attacks.neighbours import make_new_picture

FLAGS: tuple[str, ...] = ("--allow-private-media-addresses",)
NUM_URLS = 64
_MIN_VISITS = 8  # what even a careful server asks for at once
_WAIT_S = 60.0


class SlowHost:
    """A host that takes connections and questions, and never answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._visitors: list[socket.socket] = []
        self._paths = count()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def num_visits(self) -> int:
        """How many connections have been made so far."""
        return len(self._visitors)

    def count_left(self) -> int:
        """Return how many visitors have closed their connections."""
        return sum(_has_left(visitor) for visitor in self._visitors)

    def make_url(self) -> str:
        """Return an address that was never used before."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/{next(self._paths)}.png"

    def close(self) -> None:
        """End all connections and the thread."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        self._thread.join(_WAIT_S)
        for visitor in self._visitors:
            visitor.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                self._visitors.append(self._listener.accept()[0])


def _has_left(visitor: socket.socket) -> bool:
    try:
        while visitor.recv(65536, socket.MSG_DONTWAIT):
            pass  # the question, which is never read otherwise
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class _QuickHandler(BaseHTTPRequestHandler):
    """Answers each question with the sample picture, as a file that no cache has."""

    def do_GET(self) -> None:
        picture = make_new_picture()
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.send_header("Content-Length", str(len(picture)))
        self.end_headers()
        self.wfile.write(picture)

    def log_message(self, *_: object) -> None:
        """Keep the server's log empty."""


@contextmanager
def run_quick_host() -> Iterator[str]:
    """Run a host that answers at once; the value is its address without a path."""
    host = ThreadingHTTPServer(("127.0.0.1", 0), _QuickHandler)
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{host.server_address[1]}"
    finally:
        host.shutdown()
        thread.join()
        host.server_close()


def make_body(urls: list[str]) -> dict[str, Any]:
    """Return a chat about the pictures at these addresses."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": picture}} for picture in urls
    ]
    content = [*parts, {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24}


@contextmanager
def attack(
    url: str, *, urls_per_request: tuple[int, ...] = (NUM_URLS, *(1,) * NUM_URLS)
) -> Iterator[SlowHost]:
    """Send requests with so many slow addresses each, and leave at the end of the block.

    By default that is one request with 64 of them, and 64 requests with one each.
    """
    host = SlowHost()
    with ExitStack() as stack:
        stack.callback(host.close)
        for num_urls in urls_per_request:
            body = make_body([host.make_url() for _ in range(num_urls)])
            stack.enter_context(send(url, body))
        _wait_until_busy(host)
        yield host


def send(url: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and never read its answer; closing the socket ends it."""
    parts = urlsplit(url)
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection((parts.hostname, parts.port or 80), timeout=_WAIT_S)
    connection.sendall(head.encode() + content)
    return connection


def _wait_until_busy(host: SlowHost) -> None:
    deadline = time.monotonic() + _WAIT_S
    while host.num_visits < _MIN_VISITS:
        if time.monotonic() > deadline:
            raise TimeoutError("the server does not ask the slow host")
        time.sleep(0.01)
