"""Keeps the order in which long prompts are served, so that client calls take turns.

A client call may consist of many requests of the core. In the order of arrival alone, a prompt that
comes after a call with a hundred of them would wait for all of these.

Invariants:
  1. A long prompt counts as come when it came, or when the last one of its call started, if that
     was later. So between two of one call there is time for each call that waited before.
  2. The place of a request does not change once it has started, not even if it is preempted.
  3. Calls that hold less than their share of the seats come before the others.
"""

from __future__ import annotations

from sensorium.core.request import Request
from sensorium.core.seat_shares import SeatShares
from sensorium.core.waiting_queue import WaitingQueue

# The priority, the number of the request with which it counts as come, and a number that tells
# apart those that count as come with the same one: it is 0 for that one.
Order = tuple[int, int, int]
_MOST_CALLS = 64  # remembered beyond the number of waiting requests


class LongPromptOrder:
    """The order of service of the requests with long prompts."""

    def __init__(self, shares: SeatShares) -> None:
        self._shares = shares
        self._num_starts = 0
        # Call -> when the last one of it started, as an `Order` has it.
        self._last_starts: dict[str, tuple[int, int]] = {}
        self._started: dict[str, Order] = {}  # request id -> its place when it started

    def get(self, request: Request) -> Order:
        """Return the place of a request. The lowest one is served first."""
        if (order := self._started.get(request.request_id)) is not None:
            return order
        priority, arrival = request.rank
        return priority, *max((arrival, 0), self._last_starts.get(request.group, (0, 0)))

    def find_first(self, waiting: WaitingQueue) -> Request | None:
        """Return the first one that waits.

        The search takes time in proportion to the requests that it passes over.
        """
        best: tuple[bool, Order] | None = None
        first = None
        for request in waiting.iterate_long():
            priority, arrival = request.rank
            if best is not None:
                is_passed_over, (best_priority, last_arrival, _) = best
                if priority > best_priority or (not is_passed_over and arrival > last_arrival):
                    break  # this one and all behind it are less urgent, or have come later
            key = not self._shares.is_entitled(request), self.get(request)
            if best is None or key < best:
                best, first = key, request
        return first

    def find_shortest(self, waiting: WaitingQueue) -> Request | None:
        """Return the one that waits with the fewest tokens to compute, and of several the first."""
        best: tuple[bool, int, Order] | None = None
        shortest = None
        for request in waiting.iterate_long_by_length():
            length = waiting.get_length(request)
            if best is not None:
                is_passed_over, least, (priority, *_) = best
                if request.rank[0] > priority or (not is_passed_over and length > least):
                    break
            key = not self._shares.is_entitled(request), length, self.get(request)
            if best is None or key < best:
                best, shortest = key, request
        return shortest

    def note_start(self, request: Request, last_arrival: int) -> None:
        """Note that a request starts, after the one with this number has come."""
        self._started[request.request_id] = self.get(request)
        self._num_starts += 1
        self._last_starts[request.group] = last_arrival, self._num_starts

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._started.pop(request_id, None)

    def tidy(self, waiting: WaitingQueue) -> None:
        """Forget the calls without a waiting long prompt, from time to time."""
        if len(self._last_starts) > _MOST_CALLS + 2 * len(waiting):
            groups = {request.group for request in waiting.iterate_long()}
            self._last_starts = {g: n for g, n in self._last_starts.items() if g in groups}
