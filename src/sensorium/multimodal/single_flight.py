"""Deduplicates running computations (flights): callers with the same key share one and its result.

A result is kept until its last waiter has left, so that waiters can put it into a cache before the
flight is forgotten. A caller looks into that cache before `join`, and its `start` looks again, for
a result that arrived in between. So nothing is computed twice.

Invariants:
  1. Waiters of one flight get one result, or each its own copy of one error.
  2. A flight is cancelled when its last waiter has left, and can't be joined from then on.
  3. A waiter never gets the cancellation of another caller.
  4. A flight that failed can't be joined.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from sensorium.types.errors import CapacityError, InvariantError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_MAX_FLIGHTS = 3  # a waiter gives up after this many flights that other callers cancelled


# A computation that has begun. After a cancellation its result is not used, but it continues if it
# can't be stopped.
Flight = Future[Any]


class FinishedFlight(Flight):
    """A flight with a result from the start, because the caller computed it in its own thread."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.set_result(result)


@dataclass(slots=True, eq=False)
class _Entry:
    """The computation that runs for one key, and the number of callers that wait for it."""

    num_waiters: int = 0
    flight: Flight | None = None
    # Cancelled if the flight was cancelled: then its waiters start a new flight.
    outcome: Future[Any] = field(default_factory=Future)


class SingleFlight(Generic[K, V]):
    """A thread-safe table of running computations (flights), at most one for each key."""

    def __init__(self) -> None:
        self.num_flights = 0  # flights that began
        self.num_joined = 0  # callers that joined a running flight
        self.num_waiting = 0  # callers at this moment
        self._lock = threading.Lock()  # of everything here
        self._entries: dict[K, _Entry] = {}

    def join(self, key: K, start: Callable[[], Flight]) -> Waiter[K, V]:
        """Join the flight of `key`, or begin one with `start`, and return a waiter for its result.

        An error of `start` is raised here, and a copy of it by every other waiter of this flight.
        """
        entry, is_first = self._enter(key)
        if is_first:
            try:
                self._begin(key, entry, start)
            except BaseException:
                self._leave(key, entry)
                raise
        return Waiter(self, key, start, entry, is_first)

    def get(
        self,
        key: K,
        start: Callable[[], Flight],
        *,
        timeout_s: float,
        cancelled: Future[Any] | None = None,
    ) -> V:
        """Join or begin the flight of `key`, wait for it, and return its result.

        Raise `CancelledError` if `cancelled` completes first, and `TimeoutError` after `timeout_s`.
        """
        if cancelled is not None and cancelled.done():
            raise CancelledError
        waiter = self.join(key, start)
        try:
            return waiter.result(timeout_s=timeout_s, cancelled=cancelled)
        finally:
            waiter.leave()

    def _enter(self, key: K) -> tuple[_Entry, bool]:
        with self._lock:
            entry = self._entries.get(key)
            is_first = entry is None
            if entry is None:
                entry = self._entries[key] = _Entry()
                self.num_flights += 1
            else:
                self.num_joined += 1
            entry.num_waiters += 1
            self.num_waiting += 1
            return entry, is_first

    def _leave(self, key: K, entry: _Entry) -> None:
        with self._lock:
            self.num_waiting -= 1
            entry.num_waiters -= 1
            if entry.num_waiters:
                return
            self._forget(key, entry)
            flight = None if entry.outcome.done() else entry.flight
        if flight is not None:
            flight.cancel()

    def _begin(self, key: K, entry: _Entry, start: Callable[[], Flight]) -> None:
        try:
            flight = start()
        except BaseException as error:
            # A copy: the error itself holds this frame, and so the entry that would hold it.
            self._land(key, entry, copy_error(error), None)
            raise
        entry.flight = flight
        flight.add_done_callback(partial(self._land_future, key, entry))

    def _land_future(self, key: K, entry: _Entry, future: Future[Any]) -> None:
        if future.cancelled():
            self._land(key, entry, CancelledError(), None)
        elif (error := future.exception()) is not None:
            self._land(key, entry, error, None)
        else:
            self._land(key, entry, None, future.result())

    def _land(self, key: K, entry: _Entry, error: BaseException | None, result: Any) -> None:
        """Settle a flight with its error or its result, under the lock.

        The lock keeps callers from joining a flight that has failed, and from beginning a new one
        before the waiters have their result. Callbacks of `outcome` run under the lock, but they
        only wake the threads in `_wait`.
        """
        with self._lock:
            if error is not None or not entry.num_waiters:
                self._forget(key, entry)
            entry.flight = None  # a flight's callback holds this entry
            if error is None:
                entry.outcome.set_result(result)
            elif _is_own(error):
                entry.outcome.cancel()
            else:
                entry.outcome.set_exception(error)

    def _forget(self, key: K, entry: _Entry) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]


@dataclass(slots=True, eq=False)
class Waiter(Generic[K, V]):
    """One caller that waits for a flight, and counts as a waiter until it leaves."""

    _flights: SingleFlight[K, V]
    _key: K
    _start: Callable[[], Flight]
    _entry: _Entry | None  # None: the caller has left
    is_leader: bool  # the flight began with this caller

    def result(self, *, timeout_s: float, cancelled: Future[Any] | None = None) -> V:
        """Wait for the flight, and return its result or raise a copy of its error.

        If other callers cancel the flight, wait for a new one. Raise `CapacityError` if that
        happens several times. Raise `CancelledError` if `cancelled` completes first, and
        `TimeoutError` after `timeout_s` seconds. The caller still has to `leave`.
        """
        deadline = time.monotonic() + timeout_s
        for attempt in range(_MAX_FLIGHTS):
            if attempt:
                again = self._flights.join(self._key, self._start)
                self._entry, self.is_leader = again._entry, again.is_leader
            if self._entry is None:
                raise InvariantError("a caller asks for shared work (a flight) that it has left")
            outcome = self._entry.outcome
            _wait(outcome, cancelled, deadline)
            if not outcome.cancelled():
                result: V = _get_own(outcome)
                return result
            self.leave()
        raise CapacityError(
            "other requests that processed the same media item were cancelled: try again"
        )

    def leave(self) -> None:
        """Stop waiting, and cancel the flight if no other caller waits; later calls do nothing."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._flights._leave(self._key, entry)


def _is_own(error: BaseException) -> bool:
    """Return True for an interrupt or a cancellation of one caller, which others must not get."""
    return isinstance(error, CancelledError) or not isinstance(error, Exception)


def _wait(outcome: Future[Any], cancelled: Future[Any] | None, deadline: float) -> None:
    awake = threading.Event()
    outcome.add_done_callback(lambda _: awake.set())
    if cancelled is not None:
        cancelled.add_done_callback(lambda _: awake.set())
    awake.wait(max(0.0, deadline - time.monotonic()))
    if outcome.done():
        return
    if cancelled is not None and cancelled.done():
        raise CancelledError
    raise TimeoutError("the media item was not ready in time")


def _get_own(outcome: Future[Any]) -> Any:
    error = outcome.exception()
    if error is None:
        return outcome.result()
    raise _make_own(error)


def _make_own(error: BaseException) -> BaseException:
    """Return a copy of an error for one waiter, because a traceback grows with each raise."""
    own = copy_error(error)
    if own is not error and error.__traceback__ is not None:
        own.__cause__ = error
    return own


def copy_error(error: BaseException) -> BaseException:
    """Return a copy of an error, or the error itself if it can't be copied."""
    try:
        return copy.copy(error)
    except Exception:  # its constructor takes other arguments than those that it keeps
        return error
