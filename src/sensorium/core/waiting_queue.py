"""Keeps the waiting requests in the order of service, with the long prompts in a separate queue.

`core.long_prompts` decides which long prompt may start. All changes take logarithmic time in the
number of requests, except for moving pointers in lists.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter

from sensorium.core.long_queue import LongQueue
from sensorium.core.request import Request

_rank_of = attrgetter("rank")


class WaitingQueue:
    """A queue of the waiting requests, which finds and removes them by their unique ranks."""

    def __init__(self) -> None:
        self._short: list[Request] = []
        self.long = LongQueue()

    def __len__(self) -> int:
        return len(self._short) + len(self.long)

    def __iter__(self) -> Iterator[Request]:
        return merge(self._short, self.long, key=_rank_of)

    @property
    def first(self) -> Request | None:
        return next(iter(self), None)

    @property
    def first_short(self) -> Request | None:
        return self._short[0] if self._short else None

    def iterate_with(self, long_request: Request | None) -> Iterator[Request]:
        """Return the requests in the order of service: of the long prompts, only the given one."""
        if long_request is None:
            return iter(self._short)
        return merge(self._short, (long_request,), key=_rank_of)

    def add(self, request: Request) -> None:
        insort(self._short, request, key=_rank_of)

    def remove(self, request: Request) -> None:
        if request in self.long:
            self.long.remove(request)
        else:
            del self._short[bisect_left(self._short, request.rank, key=_rank_of)]
