"""Receives the bodies of requests: each within a size, a time and a least rate, and all that are
unfinished within a common memory.

Owns the unfinished bodies of this frontend. All on one event loop.

Invariants:
  1. A body that comes at the least rate or faster, within the time for a whole body, is received.
  2. Unfinished bodies never hold more bytes than `max_unfinished_bytes`, but for the piece that
     came last. Where they would, the oldest one is given up: an honest client has sent its body
     before a slow one has, so it is the slow ones that make room.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.types import Receive

from sensorium.server.http.errors import RETRY_AFTER_S, ApiError, ClientGoneError

_GRACE_S = 30.0  # before the least rate counts: a pause, or a start on a bad line


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """How large and how slow bodies may be."""

    max_bytes: int  # of one body
    timeout_s: float  # from a request's head to the end of its body
    min_bytes_per_s: int  # on average, after `_GRACE_S`
    max_unfinished_bytes: int  # of all bodies that are still coming

    def get_time_s(self, num_bytes: int) -> float:
        """Return how long a body may take, as long as this many bytes of it have come."""
        return min(self.timeout_s, _GRACE_S + num_bytes / self.min_bytes_per_s)


@dataclass(eq=False, slots=True)
class _Unfinished:
    """A body that is still coming."""

    received: bytearray = field(default_factory=bytearray)
    waiting: asyncio.Timeout | None = None  # for the next piece
    is_given_up: bool = False


class BodyIntake:
    """Receives bodies within `limits`."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self._unfinished: dict[_Unfinished, None] = {}  # in the order of their arrival
        self._num_bytes = 0  # of all of them

    async def receive(self, receive: Receive) -> bytearray:
        """Return a whole body, or raise what the client did wrong with it."""
        body = _Unfinished()
        self._unfinished[body] = None
        began = asyncio.get_running_loop().time()
        try:
            while await self._receive_piece(body, receive, began):
                pass
        finally:
            del self._unfinished[body]
            self._num_bytes -= len(body.received)
        return body.received

    def check_length(self, declared: str | None) -> None:
        """Refuse a body by its content-length, before any of it has come."""
        max_bytes = self.limits.max_bytes
        if declared is not None and declared.isdecimal() and int(declared[:20]) > max_bytes:
            raise _make_size_error(max_bytes)

    async def _receive_piece(self, body: _Unfinished, receive: Receive, began: float) -> bool:
        """Add a piece to the body. Return whether there are more."""
        deadline = began + self.limits.get_time_s(len(body.received))
        try:
            async with asyncio.timeout_at(deadline) as body.waiting:
                message = await receive()
        except TimeoutError as error:
            if body.is_given_up:
                raise self._make_memory_error() from error
            raise self._make_time_error(len(body.received)) from error
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece = message.get("body", b"")
        body.received += piece
        self._num_bytes += len(piece)
        if len(body.received) > self.limits.max_bytes:
            raise _make_size_error(self.limits.max_bytes)
        is_more: bool = message.get("more_body", False)
        if is_more:
            self._make_room(body)
        return is_more

    def _make_room(self, newest: _Unfinished) -> None:
        excess = self._num_bytes - self.limits.max_unfinished_bytes
        for body in self._unfinished:
            if excess <= 0:
                return
            if body.is_given_up:
                excess -= len(body.received)
            elif body is newest:
                raise self._make_memory_error()
            elif body.received and body.waiting is not None:
                body.is_given_up = True
                excess -= len(body.received)
                # Its reader waits inside this timeout, unless that has just expired.
                with suppress(RuntimeError):
                    body.waiting.reschedule(asyncio.get_running_loop().time())

    def _make_time_error(self, num_bytes: int) -> ApiError:
        limits = self.limits
        return ApiError(
            f"The body came too slowly: {num_bytes} bytes of it are here. A body must come at "
            f"{limits.min_bytes_per_s} bytes a second or faster, after the first {_GRACE_S:.0f} "
            f"seconds, and within {limits.timeout_s:g} seconds.",
            status=408,
            code="timeout",
        )

    def _make_memory_error(self) -> ApiError:
        return ApiError(
            f"The bodies that are being received fill the {self.limits.max_unfinished_bytes} "
            "bytes that this server keeps for them. Retry later.",
            status=503,
            code="too_many_bodies",
            reason="capacity",
            headers={"retry-after": str(RETRY_AFTER_S)},
        )


def _make_size_error(max_bytes: int) -> ApiError:
    return ApiError(
        f"the body is larger than {max_bytes} bytes, which this server allows",
        status=413,
        code="body_too_large",
        reason="body_too_large",
    )
