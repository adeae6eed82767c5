"""Attack 26: new pictures for a server with a remote cache that answers late, or not at all.

Every new picture is looked up there. A server that waits for the look-up inside a step, or with
threads that others need, lets those wait as well who want nothing of the store.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from attacks.asking import keep_asking
from attacks.neighbours import make_new_picture, make_picture_part
from attacks.slow_hosts import send

FLAGS: tuple[str, ...] = ()
DELAY_S = 1.5  # less than the two seconds for which a server waits
SILENT_S = 5.0  # for which a store that is silent by turns answers, and then does not
_NUM_CLIENTS = 4
_NUM_CLIENTS_SLOW = 40  # more than a frontend has threads for media
_NUM_PICTURES_SLOW = 4  # of each of their requests, so that it is looked up for 6 seconds
_STAY_S = 5.0  # then each of them leaves, and asks again
_MAX_REQUESTS = 2000  # of each client, so that the attack ends by itself
_PAUSE_S = 0.5  # between two requests: an attack by look-ups, not by number
_TIMEOUT_S = 300.0
_POLL_S = 0.02
_ANSWERS = {b"GETRANGE": b"$0\r\n\r\n", b"PING": b"+PONG\r\n"}
_NUMBERS = (b"STRLEN", b"EXISTS", b"EXPIRE", b"UNLINK", b"TOUCH")  # are answered with zero
_ABOUT_CONNECTION = (b"CLIENT", b"PING", b"SELECT")  # are answered at once by a slow store


class StandIn:
    """A Redis in threads of this process, in which nothing is ever found.

    Each look-up is answered after `delay_s`. With `silent_s`, nothing at all is answered for so
    long, then everything for as long, and so on.
    """

    def __init__(self, *, delay_s: float = 0.0, silent_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._silent_s = silent_s
        self._is_over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def close(self) -> None:
        """End all connections and threads."""
        self._is_over.set()
        for each in (self._listener, *self._connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes its thread
            each.close()
        self._thread.join()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        rest = b""
        with connection, suppress(OSError):
            while received := connection.recv(2**20):
                commands, rest = _split(rest + received)
                if commands:
                    self._wait(commands)
                    connection.sendall(b"".join(map(_answer, commands)))

    def _wait(self, commands: list[bytes]) -> None:
        if not all(command in _ABOUT_CONNECTION for command in commands):
            self._is_over.wait(self._delay_s)
        now = time.monotonic()
        if self._silent_s and now % (2 * self._silent_s) < self._silent_s:
            self._is_over.wait(self._silent_s - now % self._silent_s)


def _split(content: bytes) -> tuple[list[bytes], bytes]:
    """Return the names of all whole commands, and what is left behind them."""
    names: list[bytes] = []
    while content:
        head, _, rest = content.partition(b"\r\n")
        words = []
        for _ in range(int(head[1:] or b"0")):
            length, _, rest = rest.partition(b"\r\n")
            num_bytes = int(length[1:] or b"0")
            if len(rest) < num_bytes + 2:  # the rest of the command has not come yet
                return names, content
            words.append(rest[:num_bytes])
            rest = rest[num_bytes + 2 :]
        if not words:
            break
        names.append(words[0].upper())
        content = rest
    return names, content


def _answer(name: bytes) -> bytes:
    return b":0\r\n" if name in _NUMBERS else _ANSWERS.get(name, b"+OK\r\n")


@contextmanager
def prepare_silent(_model: str, _folder: Path) -> Iterator[tuple[str, ...]]:
    """Run a store that is silent by turns, and give the flags of a server that uses it."""
    with closing(StandIn(silent_s=SILENT_S)) as store:
        yield ("--mm-remote-cache", store.url)


@contextmanager
def prepare_slow(_model: str, _folder: Path) -> Iterator[tuple[str, ...]]:
    """Run a store that answers each look-up after `DELAY_S`, and give the flags as above."""
    with closing(StandIn(delay_s=DELAY_S)) as store:
        yield ("--mm-remote-cache", store.url)


def attack_silent(url: str, _folder: Path) -> AbstractContextManager[list[int]]:
    """Ask for new pictures, one in a request; the list fills with the answers' statuses."""
    return keep_asking(
        url,
        lambda client: client.post("/v1/chat/completions", json=_make_body(num_pictures=1)),
        num_clients=_NUM_CLIENTS,
        max_requests=_MAX_REQUESTS,
        timeout_s=_TIMEOUT_S,
        pause_s=_PAUSE_S,
    )


@contextmanager
def attack_slow(url: str, _folder: Path) -> Iterator[None]:
    """Ask for many new pictures at a time and leave before the answers.

    So the attack costs look-ups, and hardly any work of the processor.
    """
    is_over = threading.Event()

    def run() -> None:
        for _ in range(_MAX_REQUESTS):
            with send(url, _make_body(num_pictures=_NUM_PICTURES_SLOW)):
                if is_over.wait(_STAY_S):
                    return

    threads = [threading.Thread(target=run) for _ in range(_NUM_CLIENTS_SLOW)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _make_body(*, num_pictures: int) -> dict[str, Any]:
    parts = [make_picture_part(make_new_picture()) for _ in range(num_pictures)]
    content = [*parts, {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
