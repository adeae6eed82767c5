"""Reads from the kernel which bytes a client's machine has acknowledged."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import sys
import termios
from dataclasses import dataclass

_LOOKS_PER_TIMEOUT = 8
# The time between two checks counts as this many intervals at most. If the event loop itself was
# delayed for longer, it has sent nothing in that time.
_MAX_GAP_LOOKS = 2
# Two fields of the C struct tcp_info of Linux: tcpi_state, and tcpi_bytes_acked at byte 120.
_TCP_INFO = struct.Struct("=B119xQ")
_ESTABLISHED = 1  # the state TCP_ESTABLISHED: neither side has closed


class UnreadWatch:
    """A stopwatch, in seconds, for how long a client reads none of the bytes that wait for it."""

    def __init__(self, timeout_s: float, *, num_bytes: int, now: float) -> None:
        self.interval_s = timeout_s / _LOOKS_PER_TIMEOUT
        self._timeout_s = timeout_s
        self._num_bytes = num_bytes
        self._looked = now
        self._unread_s = 0.0

    def look(self, now: float, num_bytes: int) -> bool:
        """Return whether the client has read nothing for the whole timeout.

        If fewer bytes wait than at the last call, the client has read some, and the timeout begins
        anew.
        """
        gap_s = min(now - self._looked, _MAX_GAP_LOOKS * self.interval_s)
        self._unread_s = 0.0 if num_bytes < self._num_bytes else self._unread_s + gap_s
        self._looked, self._num_bytes = now, num_bytes
        return self._unread_s >= self._timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpProgress:
    """The kernel's report on a connection, which it gives even while nothing is read from it."""

    is_open: bool  # in both directions
    num_queued: int  # bytes that the client's machine has not acknowledged
    num_acknowledged: int  # bytes, since the connection began


def read_progress(transport: asyncio.Transport) -> TcpProgress:
    """Return whether the connection is open, and what of the sent data was acknowledged."""
    number = transport.get_extra_info("socket").fileno()
    # uvloop's socket objects can't read options, so another object for the same socket is needed.
    with socket.socket(fileno=os.dup(number)) as connection:
        report = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    state, num_acknowledged = _TCP_INFO.unpack(report.ljust(_TCP_INFO.size, b"\0"))
    return TcpProgress(
        is_open=state == _ESTABLISHED,
        num_queued=count_queued(number),
        num_acknowledged=num_acknowledged,
    )


def count_queued(number: int) -> int:
    """Return how many bytes wait in the kernel's send queue of the socket with this descriptor."""
    return int.from_bytes(fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
