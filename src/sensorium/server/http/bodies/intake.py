"""Receives the bodies of requests within limits of size, time, rate and memory.

Each body has a largest size, a longest time and a least rate; all unfinished bodies together have
a limit of memory. Owns the unfinished bodies of this frontend. Used on one event loop.

Invariants:
  1. A body that comes at the least rate or faster, within the time for a whole body, is received.
  2. Unfinished bodies never hold more than `max_unfinished_bytes` and the piece that came last.
     If they would, the oldest ones are given up. An honest client sends its body sooner than a
     slow one, so the oldest bodies are those of slow clients.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.types import Receive

from sensorium.server.http.errors import RETRY_AFTER_S, ApiError, ClientGoneError

_GRACE_S = 30.0  # before the least rate counts, for a pause or a slow start of the connection


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """The limits on the size and the speed of bodies."""

    max_bytes: int  # of one body
    timeout_s: float  # from a request's head to the end of its body
    min_bytes_per_s: int  # on average, after `_GRACE_S`
    max_unfinished_bytes: int  # of all unfinished bodies

    def get_time_s(self, num_bytes: int) -> float:
        """Return how long a body may take, as long as this many bytes of it have come."""
        return min(self.timeout_s, _GRACE_S + num_bytes / self.min_bytes_per_s)


@dataclass(eq=False, slots=True)
class _Unfinished:
    """A body that has not come completely yet."""

    received: bytearray = field(default_factory=bytearray)
    waiting: asyncio.Timeout | None = None  # the time limit of the wait for the next piece
    is_given_up: bool = False


class BodyIntake:
    """A receiver of bodies that keeps them within `limits`."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self._unfinished: dict[_Unfinished, None] = {}  # in the order of their arrival
        self._num_bytes = 0  # of all of them

    async def receive(self, receive: Receive) -> bytearray:
        """Return a whole body, or raise an error if it breaks a limit or the client has left."""
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
        """Add the next piece to the body, and return whether more will come."""
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
                # The task that reads this body waits inside this timeout. Ending it now wakes the
                # task, unless the timeout has just expired by itself.
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
