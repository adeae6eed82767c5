"""The waiting requests with long prompts: the first and the shortest of each client call.

A client call may consist of many requests of the core. In the order of arrival alone, a prompt that
comes after a call with a hundred of them would wait for all of these. So calls take turns: a long
prompt counts as arrived when it arrived, or when the last one of its call started, if that was
later. So between two of one call, each call that waited before gets its turn.

The place of a request does not change once it has started, not even if it is preempted. All changes
are logarithmic in the number of requests, except for moving pointers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from sensorium.core.request import Request

_rank_of = attrgetter("rank")
# The priority, the number of the request with which it counts as arrived, and a number to
# distinguish those that count as arrived with the same one: 0 for that one itself.
Order = tuple[int, int, int]
_Key = tuple[int, ...]  # no two requests in one list have the same
_Keyed = tuple[_Key, Request]


@dataclass(slots=True)
class _Call:
    """The waiting requests of a client call, and its place in the order."""

    by_rank: list[Request] = field(default_factory=list)
    by_length: list[_Keyed] = field(default_factory=list)
    last_start: tuple[int, int] | None = None  # of its last long prompt, as in an `Order`
    first: _Keyed | None = None  # its entries in the lists of all calls
    shortest: _Keyed | None = None


class LongQueue:
    """A queue of the waiting requests with long prompts."""

    def __init__(self) -> None:
        self._by_rank: list[Request] = []
        self._lengths: dict[str, int] = {}  # request id -> tokens that were to be computed
        self._calls: dict[str, _Call] = {}  # group -> its call, if some of its requests wait
        self._firsts: list[_Keyed] = []  # of each call, in their order
        self._shortest: list[_Keyed] = []  # of each call, in the order of lengths
        self._num_starts = 0
        self._started: dict[str, Order] = {}  # request id -> its place when it started

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[Request]:
        """Return all in the order of arrival, the most urgent ones first."""
        return iter(self._by_rank)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._lengths

    @property
    def firsts(self) -> Iterator[Request]:
        """The first one of each call, in their order."""
        return (request for _, request in self._firsts)

    @property
    def shortest(self) -> Iterator[Request]:
        """The shortest one of each call: the most urgent first, and of these the shortest."""
        return (request for _, request in self._shortest)

    def get_length(self, request: Request) -> int:
        """Return how many tokens a waiting request had to compute when it arrived."""
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
        """Note that a request starts, when `last_arrival` is the number of the newest request."""
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
        """Set a call's entries in the lists of all calls."""
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
