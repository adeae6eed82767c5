"""Limits the share of one call with many requests: half of the seats, a quarter of a step.

A call of a client may be many requests of the core: its prompts times their completions. While
requests of others wait, one call holds at most half of all seats; alone it may hold them all, and
gives the surplus back when others come. Larger steps take longer for all running requests: while
others run, at most a quarter of all seats decode for one call in a step, in turns. Nothing is taken
from a call for others that are less urgent. Makes decisions only: the scheduler preempts and
starts.

Invariants:
  1. At most one call holds more than its share: two would need more seats than there are.
  2. A call that holds less than its share is served in the order of ranks, as any other.
  3. A request that gave its seat back does not get one before the requests it made room for: its
     call still holds its share, and they belong to calls that do not.
  4. Of every call that runs, at least one request takes part in each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import nsmallest
from itertools import takewhile

from sensorium.core.request import Request


class SeatShares:
    """The numbers of seats that calls hold, and the decisions that follow from them."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._share = max(1, max_num_seqs // 2)
        self._step_share = max(1, max_num_seqs // 4)
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
        """Return the waiting request that is to start next.

        It is the first one of a call that holds less than its share. If no request that is as
        urgent as the first one has such a call, it is the first one. Passing over the rest costs
        time in proportion to the waiting requests of one call.
        """
        for request in waiting:
            if _get_urgency(request) > _get_urgency(waiting[0]):
                break
            if self._num_held[request.group] < self._share:
                return request
        return waiting[0]

    def get_surplus(
        self, running: Sequence[Request], waiting: Sequence[Request], *, is_next_blocked: bool
    ) -> list[Request]:
        """Return the requests that must give their seats to others.

        They are the last ones of the call that holds more than its share, one for each request of
        others that finds no seat. With `is_next_blocked` the next of these found no room although
        there was a seat.
        """
        if self._largest is None or not waiting:
            return []
        num_free = 0 if is_next_blocked else self._max_num_seqs - len(running)
        num_over = self._num_held[self._largest] - self._share
        own = [request for request in running if request.group == self._largest]
        urgent = takewhile(lambda r: _get_urgency(r) <= _get_urgency(own[0]), waiting)
        num_wanted = self._count_entitled(urgent, most=num_over + num_free) - num_free
        if num_wanted <= 0:
            return []
        return own[::-1][: min(num_wanted, num_over)]

    def get_resting(self, running: Sequence[Request]) -> set[str]:
        """Return the ids of requests that take no part in the next step.

        They belong to a call beyond its share of a step, if others as urgent run too. The ones with
        the fewest tokens go on, so that all advance alike. Only requests that decode rest; the
        others fill tokens, not rows.
        """
        if len(self._num_held) < 2:
            return set()
        resting: set[str] = set()
        urgencies = {request.group: _get_urgency(request) for request in running}
        for group in [g for g, num_held in self._num_held.items() if num_held > self._step_share]:
            urgency = urgencies[group]
            if any(g != group and other <= urgency for g, other in urgencies.items()):
                own = [r for r in running if r.group == group]
                decoding = [r for r in own if r.num_computed_tokens == r.num_tokens - 1]
                num_others = len(own) - len(decoding)
                num_taken = max(1, self._step_share - num_others)
                taken = nsmallest(num_taken, decoding, key=lambda r: (r.num_tokens, r.rank))
                resting.update({r.request_id for r in decoding} - {r.request_id for r in taken})
        return resting

    def _count_entitled(self, waiting: Iterable[Request], *, most: int) -> int:
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


def _get_urgency(request: Request) -> int:
    """Return the priority of a request. Lower values are more urgent."""
    return request.rank[0]
