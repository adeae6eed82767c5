"""Receives the bodies of requests within limits of size, time, rate and memory.

A `BodyIntake` owns unfinished bodies of its frontend process, and is used on one event loop. Each
frontend has one for bodies in memory, and one for uploads, which `bodies.uploads` keeps on disk.

Invariants:
  1. A body that comes at the least rate or faster, within the time for a whole body, is received.
  2. Unfinished bodies never hold more than `max_unfinished_bytes` plus the last piece. If they
     would, the oldest ones are refused. An honest client sends its body sooner than a slow one, so
     the oldest bodies are those of slow clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from starlette.types import Receive

from sensorium.server.http.errors import RETRY_AFTER_S, ApiError, ClientGoneError

_GRACE_S = 30.0  # before the least rate counts, for a pause or a slow start of the connection


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    max_bytes: int  # of one body
    timeout_s: float  # from a request's head to the end of its body
    min_bytes_per_s: int  # on average, after `_GRACE_S`
    max_unfinished_bytes: int  # of all unfinished bodies
    size_option: str = "--max-body-mb"  # the option that `max_bytes` comes from

    def get_time_s(self, num_bytes: int) -> float:
        """Return how many seconds a body may take in all, once `num_bytes` of it have arrived."""
        return min(self.timeout_s, _GRACE_S + num_bytes / self.min_bytes_per_s)


@dataclass(eq=False, slots=True)
class _Unfinished:
    num_bytes: int = 0  # that have arrived
    waiting: asyncio.Timeout | None = None  # the time limit of the wait for the next piece
    is_given_up: bool = False  # refused, so that its memory can be used for other bodies


class BodyIntake:
    """A receiver of request bodies, which refuses those that exceed one of the `limits`."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self._unfinished: dict[_Unfinished, None] = {}  # in the order of their arrival
        self._num_bytes = 0  # of all unfinished bodies

    async def receive(self, receive: Receive) -> bytearray:
        """Return the whole body of a request, from its ASGI `receive` function.

        Raise an `ApiError` if the body exceeds a limit, and `ClientGoneError` if the client leaves.
        """
        received = bytearray()

        async def keep(piece: bytes) -> None:
            received.extend(piece)

        await self.receive_into(receive, keep)
        return received

    async def receive_into(
        self, receive: Receive, keep: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Receive a whole body, and pass each piece to `keep`, which is awaited each time."""
        body = _Unfinished()
        self._unfinished[body] = None
        began = asyncio.get_running_loop().time()
        try:
            is_more = True
            while is_more:
                piece, is_more = await self._receive_piece(body, receive, began)
                await keep(piece)
        finally:
            del self._unfinished[body]
            self._num_bytes -= body.num_bytes

    def check_length(self, declared: str | None) -> None:
        """Raise an `ApiError` if the header `content-length` declares a body that is too large."""
        max_bytes = self.limits.max_bytes
        if declared is not None and declared.isdecimal() and int(declared[:20]) > max_bytes:
            raise self._make_size_error()

    async def _receive_piece(
        self, body: _Unfinished, receive: Receive, began: float
    ) -> tuple[bytes, bool]:
        """Return the next piece and whether more follow; `began` is in the event loop's time."""
        if body.is_given_up:  # while `keep` had its last piece, so that no wait was ended
            raise self._make_memory_error()
        deadline = began + self.limits.get_time_s(body.num_bytes)
        try:
            async with asyncio.timeout_at(deadline) as body.waiting:
                message = await receive()
        except TimeoutError as error:
            if body.is_given_up:
                raise self._make_memory_error() from error
            raise self._make_time_error(body.num_bytes) from error
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece: bytes = message.get("body", b"")
        body.num_bytes += len(piece)
        self._num_bytes += len(piece)
        if body.num_bytes > self.limits.max_bytes:
            raise self._make_size_error()
        is_more: bool = message.get("more_body", False)
        if is_more:
            self._make_room(body)
        return piece, is_more

    def _make_room(self, newest: _Unfinished) -> None:
        excess = self._num_bytes - self.limits.max_unfinished_bytes
        for body in self._unfinished:
            if excess <= 0:
                return
            if body.is_given_up:
                excess -= body.num_bytes
            elif body is newest:
                raise self._make_memory_error()
            elif body.num_bytes and body.waiting is not None:
                body.is_given_up = True
                excess -= body.num_bytes
                # The task that reads this body waits inside this timeout. Ending it now wakes the
                # task, unless the timeout has just expired by itself, or the task keeps a piece.
                with suppress(RuntimeError):
                    body.waiting.reschedule(asyncio.get_running_loop().time())

    def _make_time_error(self, num_bytes: int) -> ApiError:
        limits = self.limits
        return ApiError(
            f"The body came too slowly: only {num_bytes} bytes have arrived. A body must come at "
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

    def _make_size_error(self) -> ApiError:
        limits = self.limits
        return ApiError(
            f"the body is larger than {limits.max_bytes} bytes, the limit of this server "
            f"({limits.size_option})",
            status=413,
            code="body_too_large",
            reason="body_too_large",
        )
