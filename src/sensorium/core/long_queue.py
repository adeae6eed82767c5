"""Keeps the waiting long prompts, and finds the first and the shortest one of each client call.

A client call may make many requests in the core, which have the same `group`. In the order of
arrival alone, a prompt that arrives after a call with a hundred long prompts would wait for all of
them. So calls take turns: a long prompt counts as arrived when the last long prompt of its call
started, if that was after its own arrival. Between two prompts of one call, each call that already
waited gets its turn.

The place of a request does not change once it has started, not even if it is preempted. All changes
take logarithmic time in the number of requests, except for moving pointers in lists.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from sensorium.core.request import Request

_rank_of = attrgetter("rank")
# A place in the order: the priority, the arrival number that counts for the request, and a number
# to distinguish requests that count as arrived together: 0 for the one that really arrived then.
Order = tuple[int, int, int]
_Key = tuple[int, ...]  # unique in each list
_Keyed = tuple[_Key, Request]


@dataclass(slots=True)
class _Call:
    """The waiting requests of a client call, and its place in the order."""

    by_rank: list[Request] = field(default_factory=list)
    by_length: list[_Keyed] = field(default_factory=list)
    last_start: tuple[int, int] | None = None  # of its last prompt, as in an `Order`
    first: _Keyed | None = None  # its entries in the lists of all calls
    shortest: _Keyed | None = None


class LongQueue:
    """A queue of the waiting requests with long prompts."""

    def __init__(self) -> None:
        self._by_rank: list[Request] = []
        self._lengths: dict[str, int] = {}  # request id -> tokens to compute, when it was added
        self._calls: dict[str, _Call] = {}  # group -> its call, if some of its requests wait
        self._firsts: list[_Keyed] = []  # of each call, in their order
        self._shortest: list[_Keyed] = []  # of each call, in the order of lengths
        self._num_starts = 0
        self._started: dict[str, Order] = {}  # request id -> its place when it started

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[Request]:
        """Return all requests, sorted by priority and then by arrival."""
        return iter(self._by_rank)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._lengths

    @property
    def firsts(self) -> Iterator[Request]:
        """The first request of each client call, in the order of service."""
        return (request for _, request in self._firsts)

    @property
    def shortest(self) -> Iterator[Request]:
        """The shortest request of each client call, sorted by priority and then by length."""
        return (request for _, request in self._shortest)

    def get_length(self, request: Request) -> int:
        """Return how many tokens a waiting request had to compute when it was added."""
        return self._lengths[request.request_id]

    def get_order(self, request: Request) -> Order:
        """Return the place of a request that waits or has started; the lowest is served first."""
        if (order := self._started.get(request.request_id)) is not None:
            return order
        priority, arrival = request.rank
        call = self._calls.get(request.group)
        if call is None or call.last_start is None:
            return priority, arrival, 0
        return priority, *max((arrival, 0), call.last_start)

    def add(self, request: Request, num_tokens: int) -> None:
        self._lengths[request.request_id] = num_tokens
        insort(self._by_rank, request, key=_rank_of)
        call = self._calls.setdefault(request.group, _Call())
        insort(call.by_rank, request, key=_rank_of)
        key = self._get_length_key(request)
        call.by_length.insert(bisect_left(call.by_length, (key,)), (key, request))
        self._update(request.group)

    def remove(self, request: Request) -> None:
        """Remove a request that starts or has ended."""
        _remove(self._by_rank, request)
        call = self._calls[request.group]
        _remove(call.by_rank, request)
        del call.by_length[bisect_left(call.by_length, (self._get_length_key(request),))]
        del self._lengths[request.request_id]
        self._update(request.group)

    def note_start(self, request: Request, last_arrival: int) -> None:
        """Record that a request starts; `last_arrival` is the number of the newest request."""
        self._started[request.request_id] = self.get_order(request)
        self._num_starts += 1
        if (call := self._calls.get(request.group)) is not None:
            call.last_start = last_arrival, self._num_starts
            self._update(request.group)

    def forget(self, request_id: str) -> None:
        self._started.pop(request_id, None)

    def _get_length_key(self, request: Request) -> _Key:
        priority, arrival = request.rank
        return priority, self._lengths[request.request_id], arrival

    def _update(self, group: str) -> None:
        """Update a call's entries in the lists of all calls."""
        call = self._calls[group]
        for queue, keyed in ((self._firsts, call.first), (self._shortest, call.shortest)):
            if keyed is not None:
                del queue[bisect_left(queue, (keyed[0],))]
        if not call.by_rank:
            del self._calls[group]
            return
        first, (_, shortest) = call.by_rank[0], call.by_length[0]
        call.first = self.get_order(first), first
        priority, *place = self.get_order(shortest)
        call.shortest = (priority, self._lengths[shortest.request_id], *place), shortest
        for queue, keyed in ((self._firsts, call.first), (self._shortest, call.shortest)):
            queue.insert(bisect_left(queue, (keyed[0],)), keyed)


def _remove(queue: list[Request], request: Request) -> None:
    del queue[bisect_left(queue, request.rank, key=_rank_of)]
