"""Limits a client call with many requests to half of the seats, and in a step to a quarter of them.

A client call makes one request in the core for each prompt and completion, with the same `group`.
While requests of other calls wait, one call holds at most half of all seats. A call that is alone
may hold all seats, and gives the surplus back when other calls arrive. Larger steps take longer for
all running requests. So while other calls run, at most `max_num_seqs` / 4 requests of one call
decode in a step, in turns. No call gives way to less urgent ones. This module only decides: the
scheduler preempts and starts requests.

Invariants:
  1. At most one call holds more than its share: two would need more seats than there are.
  2. A call that holds less than its share is served in the order of ranks, like any other.
  3. A request that gave its seat back does not get one before the requests it made room for: its
     call still holds its full share, and they belong to calls that hold less.
  4. At least one request of every running call takes part in each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import nsmallest
from itertools import takewhile

from sensorium.core.request import Request


class SeatShares:
    """A record of how many seats each client call holds, and the rules that limit its share."""

    def __init__(self, max_num_seqs: int) -> None:
        self._share = max(1, max_num_seqs // 2)
        self._step_share = max(1, max_num_seqs // 4)
        self._num_held: Counter[str] = Counter()  # group -> its requests that run
        self._largest: str | None = None  # the group that holds more than its share

    def take(self, request: Request) -> None:
        """Record that a request has started to run."""
        group = request.group
        self._num_held[group] += 1
        if self._num_held[group] > self._share:
            self._largest = group

    def release(self, request: Request) -> None:
        """Record that a request has stopped running."""
        group = request.group
        self._num_held[group] -= 1
        if group == self._largest and self._num_held[group] <= self._share:
            self._largest = None
        if not self._num_held[group]:
            del self._num_held[group]

    def get_next(self, waiting: Iterable[Request]) -> Request | None:
        """Return the waiting request that is to start next, or `None` if none waits.

        Among the most urgent requests, this is the first one from a call that holds less than its
        share, or else the first of all. The search takes time in proportion to the requests that
        are passed over.
        """
        first = None
        for request in waiting:
            first = first or request
            if _get_urgency(request) > _get_urgency(first):
                break
            if self.is_entitled(request):
                return request
        return first

    def is_entitled(self, request: Request) -> bool:
        """Return whether a waiting request could start within the share of its client call."""
        return self._num_held[request.group] < self._share

    def count_entitled(self, waiting: Iterable[Request], *, most: int) -> int:
        """Count the waiting requests that could start within their calls' shares, up to `most`."""
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

    def get_surplus(
        self, running: Sequence[Request], waiting: Iterable[Request], *, num_free: int
    ) -> list[Request]:
        """Return the running requests that must give up their seats to other client calls.

        They are the latest requests of the call that holds more than its share: one for each
        waiting request of another call that is entitled to a seat and finds none.
        """
        # `num_free` is 0, whatever seats are free, if the next waiting request lacks memory.
        if self._largest is None:
            return []
        num_over = self._num_held[self._largest] - self._share
        own = [request for request in running if request.group == self._largest]
        urgent = takewhile(lambda r: _get_urgency(r) <= _get_urgency(own[0]), waiting)
        num_wanted = self.count_entitled(urgent, most=num_over + num_free) - num_free
        if num_wanted <= 0:
            return []
        return own[::-1][: min(num_wanted, num_over)]

    def get_resting(self, running: Sequence[Request]) -> set[str]:
        """Return the ids of the running requests that must sit out the next step.

        Of each call, the requests with the fewest tokens take part, so that all of them advance at
        the same rate. Requests that still compute their prompt never sit out.
        """
        if len(self._num_held) < 2:
            return set()
        resting: set[str] = set()
        urgencies = {request.group: _get_urgency(request) for request in running}
        for group in [g for g, num_held in self._num_held.items() if num_held > self._step_share]:
            urgency = urgencies.get(group)
            if urgency is None:  # none of its requests has work
                continue
            if any(g != group and other <= urgency for g, other in urgencies.items()):
                own = [r for r in running if r.group == group]
                decoding = [r for r in own if r.num_computed_tokens == r.num_tokens - 1]
                num_others = len(own) - len(decoding)
                num_taken = max(1, self._step_share - num_others)
                taken = nsmallest(num_taken, decoding, key=lambda r: (r.num_tokens, r.rank))
                resting.update({r.request_id for r in decoding} - {r.request_id for r in taken})
        return resting


def _get_urgency(request: Request) -> int:
    """Return the priority of a request; a lower value is more urgent."""
    return request.rank[0]
