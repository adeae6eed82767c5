"""Keeps the requests that wait for their turn, in the order of service, and long prompts apart.

Only keeps: `core.long_prompts` decides which long prompt may start. A request is found and removed
by its rank, which no other request has.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter

from sensorium.core.request import Request

_rank_of = attrgetter("rank")
# The priority, the tokens that were to be computed when it came, and the arrival.
_Length = tuple[int, int, int]


class WaitingQueue:
    """The waiting requests in the order of service.

    Those with long prompts are found by their length, too. All changes take logarithmic time in
    the number of requests, but for the moving of pointers.
    """

    def __init__(self) -> None:
        self._short: list[Request] = []
        self._long: list[Request] = []
        self._by_length: list[tuple[_Length, Request]] = []  # of the long ones
        self._lengths: dict[str, _Length] = {}  # request id -> its key, of the long ones

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def __iter__(self) -> Iterator[Request]:
        return merge(self._short, self._long, key=_rank_of)

    @property
    def first(self) -> Request | None:
        return next(iter(self), None)

    @property
    def first_short(self) -> Request | None:
        return self._short[0] if self._short else None

    @property
    def first_long(self) -> Request | None:
        return self._long[0] if self._long else None

    def iterate_long(self) -> Iterator[Request]:
        """Return the long prompts in the order of service."""
        return iter(self._long)

    def iterate_long_by_length(self) -> Iterator[Request]:
        """Return the long prompts: the most urgent ones first, and of these the shortest."""
        return (request for _, request in self._by_length)

    def get_length(self, request: Request) -> int:
        """Return how many tokens one of the long prompts had to compute when it came."""
        return self._lengths[request.request_id][1]

    def is_long(self, request: Request) -> bool:
        """Return whether a request waits with the long prompts."""
        return request.request_id in self._lengths

    def iterate_with(self, long_request: Request | None) -> Iterator[Request]:
        """Return all requests in the order of service, with at most one of the long prompts."""
        if long_request is None:
            return iter(self._short)
        return merge(self._short, (long_request,), key=_rank_of)

    def add(self, request: Request) -> None:
        insort(self._short, request, key=_rank_of)

    def add_long(self, request: Request, num_tokens: int) -> None:
        """Add a request with a long prompt that has `num_tokens` to compute."""
        insort(self._long, request, key=_rank_of)
        priority, arrival = request.rank
        length = self._lengths[request.request_id] = priority, num_tokens, arrival
        self._by_length.insert(bisect_left(self._by_length, (length,)), (length, request))

    def remove(self, request: Request) -> None:
        length = self._lengths.pop(request.request_id, None)
        if length is not None:
            del self._by_length[bisect_left(self._by_length, (length,))]
        queue = self._short if length is None else self._long
        del queue[bisect_left(queue, request.rank, key=_rank_of)]
