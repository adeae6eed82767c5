"""Passes received data to a connection's parser in portions, a few in each event-loop turn.

A read may have 256 KB: a moment's work if it is one body, but a second's, in which no other client
is served, if it is 30,000 fragments of two bytes. So a parser gets no more than a turn may cost,
and the connection is not read until the parser has the rest. Pieces (fragments, control frames,
chunks) have an allowance: a connection that has used it up waits until it has grown again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_MAX_TURN_BYTES = 2**15
_MAX_TURN_PIECES = 64  # and those of the portion in which this number is reached


class Allowance:
    """A rate limit (token bucket): `most` events at once, and `per_s` more each second."""

    def __init__(self, most: float, *, per_s: float, now: float) -> None:
        self._most = most
        self._per_s = per_s
        self._left = most
        self._taken = now  # when it was last taken from

    def take(self, number: int, now: float) -> float:
        """Count `number` events, and return the seconds to wait, which are 0 within the limit."""
        grown = (now - self._taken) * self._per_s
        self._left = min(self._most, self._left + grown) - number
        self._taken = now
        return max(0.0, -self._left / self._per_s)


class Turns:
    """The data that a connection has received and its parser has not got yet.

    It decides when the transport reads: not while data waits here, nor while `is_held` returns
    true. Call `go_on` when `is_held` may have become false. `get_size` returns how many bytes the
    next portion may have. `transport` must be set before anything is added.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        parse: Callable[[bytes], None],
        is_held: Callable[[], bool],
        get_size: Callable[[], int],
        pieces: Allowance,
    ) -> None:
        self._loop = loop
        self._parse = parse
        self._is_held = is_held
        self._get_size = get_size
        self._pieces = pieces
        self._num_pieces = 0  # of this turn
        self._due = 0.0  # when the next turn may be
        self._rest = memoryview(b"")
        self._next: asyncio.TimerHandle | None = None
        self._is_paused = False  # the transport, by this object

    @property
    def has_rest(self) -> bool:
        return len(self._rest) > 0

    def add(self, data: bytes) -> None:
        """Parse what was received, or keep it until its turn comes."""
        if self._rest:  # a transport may have had more when it was paused
            data = bytes(self._rest) + data
        self._rest = memoryview(data)
        if self._next is None:
            self._take_turn()

    def count_piece(self) -> None:
        self._num_pieces += 1

    def go_on(self) -> None:
        """Let the transport read, or plan a turn for waiting data, unless the parser is held."""
        if self.transport.is_closing():
            self.drop()
            return
        wait_s = max(0.0, self._due - self._loop.time())
        if not (self._rest or wait_s or self._is_held()):
            self._is_paused = False
            self.transport.resume_reading()
            return
        self._is_paused = True
        self.transport.pause_reading()
        if self._next is None and not self._is_held():
            self._next = self._loop.call_later(wait_s, self._take_turn)

    def drop(self) -> None:
        """Forget what waits, because the connection has ended or has another parser."""
        self._rest = memoryview(b"")
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._is_paused and not self.transport.is_closing():
            self.transport.resume_reading()
        self._is_paused = False

    def _take_turn(self) -> None:
        self._next = None
        self._num_pieces = num_bytes = 0
        while self._may_parse(num_bytes):
            size = self._get_size()
            portion, self._rest = self._rest[:size], self._rest[size:]
            num_bytes += len(portion)
            self._parse(bytes(portion))
        now = self._loop.time()
        self._due = now + self._pieces.take(self._num_pieces, now)
        if self._rest or self._due > now or self._is_paused:
            self.go_on()

    def _may_parse(self, num_bytes: int) -> bool:
        """Return whether the parser gets more data in this turn, after `num_bytes` bytes."""
        return (
            len(self._rest) > 0
            and num_bytes < _MAX_TURN_BYTES
            and self._num_pieces < _MAX_TURN_PIECES
            and not self.transport.is_closing()
            and not self._is_held()
        )
