"""Connections of clients that don't read what they asked for: they are ended after a while.

What a client has not read waits in the kernel and then in the connection's buffer. When that is
full, nothing more is made for it; what the engine goes on to generate is kept as text, once. A
client that takes no byte for the whole timeout loses its connection, and its request ends as if it
had left. One that reads slowly keeps both: any byte that its machine acknowledges is a sign of
life. The connection's buffer alone would not show that: the kernel takes more only when a large
part of its own queue is free again.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import struct
import sys
import termios
from typing import Any

from sensorium.server.http.connections.http_protocol import LimitedHttpProtocol

logger = logging.getLogger(__name__)
_LOOKS_PER_TIMEOUT = 8
# Of the time between two looks at most so many intervals count: a loop that was itself held up has
# sent nothing meanwhile.
_MAX_GAP_LOOKS = 2
_LINGER_NOT = struct.pack("ii", 1, 0)  # struct linger: on, for no time


class UnreadWatch:
    """Adds up for how long nothing was taken from a buffer. It has no clock."""

    def __init__(self, timeout_s: float, *, num_bytes: int, now: float) -> None:
        self.interval_s = timeout_s / _LOOKS_PER_TIMEOUT
        self._timeout_s = timeout_s
        self._num_bytes = num_bytes
        self._looked = now
        self._unread_s = 0.0

    def look(self, now: float, num_bytes: int) -> bool:
        """Return whether nothing was taken for the whole timeout."""
        gap_s = min(now - self._looked, _MAX_GAP_LOOKS * self.interval_s)
        self._unread_s = 0.0 if num_bytes < self._num_bytes else self._unread_s + gap_s
        self._looked, self._num_bytes = now, num_bytes
        return self._unread_s >= self._timeout_s


class WatchedHttpProtocol(LimitedHttpProtocol):
    """A connection whose buffer is watched while it is full."""

    stream_timeout_s = 60.0  # 0: it is not watched

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._next_look: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.stream_timeout_s and self._next_look is None:
            watch = UnreadWatch(
                self.stream_timeout_s, num_bytes=self._count_unread(), now=self.loop.time()
            )
            self._look_later(watch)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_looking()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_looking()
        super().connection_lost(exc)

    def _look_later(self, watch: UnreadWatch) -> None:
        self._next_look = self.loop.call_later(watch.interval_s, self._look, watch)

    def _look(self, watch: UnreadWatch) -> None:
        if watch.look(self.loop.time(), self._count_unread()):
            logger.info("a client read nothing for %g s: it is cut off", self.stream_timeout_s)
            self._next_look = None
            self._cut_off()
            return
        self._look_later(watch)

    def _count_unread(self) -> int:
        """Return the bytes that wait in the connection's buffer and in the kernel's queue."""
        number = self.transport.get_extra_info("socket").fileno()
        queued = fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _cut_off(self) -> None:
        """End the connection, and let the kernel drop what it still holds for the client."""
        number = self.transport.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(number)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self.transport.abort()

    def _stop_looking(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None


def make_http_protocol(
    *, head_timeout_s: float, max_connections: int | None, stream_timeout_s: float
) -> type[WatchedHttpProtocol]:
    """Return the class of connections with these limits, as uvicorn takes it."""
    limits = {
        "head_timeout_s": head_timeout_s,
        "max_connections": max_connections,
        "stream_timeout_s": stream_timeout_s,
    }
    return type("HttpProtocol", (WatchedHttpProtocol,), limits)
