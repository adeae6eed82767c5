"""Who may take a seat of a step when one call has many requests: half of them at most, each.

A call of a client may be many requests of the core: its prompts times their completions. While
requests of others wait, one call holds at most half of all seats; alone it may hold them all, and
gives the surplus back when others come. Decisions only: the scheduler preempts and starts.

Invariants:
  1. At most one call holds more than its share: two would need more seats than there are.
  2. A call that holds less than its share is served in the order of ranks, as any other.
  3. A request that gave its seat back does not get one before the requests it made room for: its
     call still holds its share, and they belong to calls that do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sensorium.core.request import Request


class SeatShares:
    """Counts the seats that each call holds."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._share = max(1, max_num_seqs // 2)
        self._num_held: Counter[str] = Counter()  # group -> its requests that run
        self._largest: str | None = None  # the group that holds more than its share

    def take(self, request: Request) -> None:
        """Note that a request runs from now on."""
        group = request.group
        self._num_held[group] += 1
        if self._num_held[group] > self._share:
            self._largest = group

    def release(self, request: Request) -> None:
        """Note that a request runs no more."""
        group = request.group
        self._num_held[group] -= 1
        if group == self._largest and self._num_held[group] <= self._share:
            self._largest = None
        if not self._num_held[group]:
            del self._num_held[group]

    def get_next(self, waiting: Sequence[Request]) -> Request:
        """Return the first whose call holds less than its share; the first of all if there is none.

        Passing over the rest costs time in proportion to the waiting requests of one call.
        """
        for request in waiting:
            if self._num_held[request.group] < self._share:
                return request
        return waiting[0]

    def get_surplus(
        self, running: Sequence[Request], waiting: Sequence[Request], *, is_next_blocked: bool
    ) -> list[Request]:
        """Return the requests that must give their seats to others: the last ones of the call that
        holds more than its share, one for each request of others that finds no seat.
        `is_next_blocked`: the next of them found no room although there was a seat.
        """
        if self._largest is None or not waiting:
            return []
        num_free = 0 if is_next_blocked else self._max_num_seqs - len(running)
        num_over = self._num_held[self._largest] - self._share
        num_wanted = self._count_entitled(waiting, most=num_over + num_free) - num_free
        if num_wanted <= 0:
            return []
        own = [request for request in running if request.group == self._largest]
        return own[::-1][: min(num_wanted, num_over)]

    def _count_entitled(self, waiting: Sequence[Request], *, most: int) -> int:
        """Count the waiting requests that their calls' shares have room for, up to `most`."""
        taken: Counter[str] = Counter()
        num_entitled = 0
        for request in waiting:
            if num_entitled == most:
                break
            group = request.group
            if self._num_held[group] + taken[group] < self._share:
                taken[group] += 1
                num_entitled += 1
        return num_entitled
