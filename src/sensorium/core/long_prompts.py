"""Decides which long prompts get tokens of a step, and how many, while there are other requests.

A prompt is long if more than `threshold` of its tokens are to be computed when it starts. It stays
long until all of them are computed. A step with many of its tokens takes long, and all other
requests wait for that step. This module only decides: the scheduler acts on the decisions.

Invariants:
  1. While other requests wait for their first token, long prompts together have at most `threshold`
     tokens of a step, and at most half of it. Only an unsplittable span may exceed that.
  2. While other requests run, long prompts rest after a step with their tokens: for `pause` steps
     with work of others per `threshold` tokens, and at most `pause`. When the other requests have
     ended, more may arrive soon. So long prompts get few tokens of a step at first, and then twice
     as many each time.
  3. In each step in which long prompts take part, one of them is served before the others. Turns
     alternate: the first in their order (`core.long_queue`), so that none starves, then the one
     with the fewest tokens left.
  4. While long prompts run, another one starts only if it precedes them in their order, or has at
     most half of the tokens that each of them has left. So few of them hold seats and blocks.
  5. A prompt that got nothing in its turn, because another resource was missing, keeps its turn.
  6. Long prompts never give way to less urgent requests.
  7. No long prompt takes a seat that was freed for another request. If the first in the order finds
     no seat in its turn, the next free seat is for it and for the requests before it. It takes that
     seat at once; if it is not its turn, it gets one token of the step.
  8. Where these rules would leave a step empty, it is planned without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from sensorium.core.long_queue import LongQueue, Order
from sensorium.core.request import Request
from sensorium.core.seat_shares import SeatShares
from sensorium.core.waiting_queue import WaitingQueue

_FIRST_PIECE = 8  # long prompts that are alone begin with this fraction of `threshold`: 1 / 8


class _Entry(NamedTuple):
    """A long prompt that may be served first in a step."""

    num_left: int  # tokens to compute
    order: Order
    request: Request


class LongPrompts:
    """A planner of how many tokens long prompts get in each step, and which is served first."""

    def __init__(
        self, threshold: int, *, pause: int, max_num_tokens: int, shares: SeatShares
    ) -> None:
        self._shares = shares
        self._threshold = threshold  # 0: no prompt is long
        # Steps. 0: long prompts take part in every step, and have all of it when they are alone.
        self._pause = pause
        self._max_num_tokens = max_num_tokens
        self._running: dict[str, Request] = {}
        self._num_steps_to_rest = 0
        self._least_alone = max(1, threshold // _FIRST_PIECE)
        self._most_alone = self._least_alone  # tokens of a step without other requests
        self._is_turn_of_first = True  # otherwise the shortest has its turn
        self._kept_by: str | None = None  # the prompt that keeps its turn
        self._claimer: Request | None = None  # it found no seat in its turn: the next is for it
        self._next_claimer: Request | None = None
        # State of the step that is being planned:
        self._has_room_made: Request | None = None  # a waiting one that others make room for
        self._chosen: Request | None = None  # served before the other long prompts
        self._num_for_chosen = 0  # tokens
        self._num_spare = 0  # tokens for all other long prompts together
        self._is_resting = False
        self._is_lifted = False
        self._num_computed = 0  # tokens of all long prompts
        self._has_refused = False
        self._keeper: str | None = None

    def is_long(self, request: Request, num_cached_tokens: int) -> bool:
        """Return whether the prompt of a request that starts with these cached tokens is long."""
        if not self._threshold or request.is_stream:  # the tokens of a stream arrive one by one
            return False
        return request.num_tokens - num_cached_tokens > self._threshold

    def add(self, request: Request) -> None:
        """Record that a request with a long prompt runs."""
        self._running[request.request_id] = request

    def remove(self, request_id: str) -> None:
        """Record that a request does not run any more, whether its prompt is long or not."""
        self._running.pop(request_id, None)

    # ---- planning a step, in the order of these methods

    def begin_step(self, running: Sequence[Request], waiting: WaitingQueue) -> None:
        """Decide whether long prompts take part in a step, and with how many tokens."""
        self._running = {r.request_id: r for r in self._running.values() if _has_prompt_left(r)}
        self._has_room_made = self._chosen = self._keeper = None
        self._is_resting = self._has_refused = False
        self._num_computed = 0
        self._num_spare = self._max_num_tokens
        ranks = [request.rank for request in self._running.values()]
        ranks += [request.rank for request in islice(waiting.long, 1)]
        if not ranks:
            self._most_alone = self._least_alone
        if not ranks or self._is_lifted:
            return
        # Long prompts do not give way to less urgent requests.
        priority, _ = min(ranks)
        others = [r for r in (waiting.first_short,) if r is not None and r.rank[0] <= priority]
        has_newcomers = bool(others)
        for request in running:  # in the order of service: those behind are less urgent
            if request.rank[0] > priority or has_newcomers:
                break
            if request.request_id not in self._running:
                others.append(request)
                has_newcomers = request.first_token is None
        self._is_resting = bool(others) and self._num_steps_to_rest > 0 and self._kept_by is None
        if others:
            self._most_alone = self._least_alone
        if has_newcomers:
            self._num_spare = max(1, min(self._threshold, self._max_num_tokens // 2))
        elif self._pause and not others:
            self._num_spare = min(self._most_alone, self._max_num_tokens)

    def get_entitled(self, waiting: WaitingQueue) -> Request | None:
        """Return the waiting long prompt that would be chosen if it had a free seat, or `None`."""
        if self._is_lifted:
            return self._shares.get_next(waiting.long.firsts)
        if self._is_resting or not self._is_turn_of_first:
            claimer = self._get_claimer(waiting.long)
            if claimer is not None or self._is_resting:
                return claimer
        found = self._find(self._list_entries(waiting))
        if found is None or found.request not in waiting.long:
            return None
        if self._shares.is_entitled(found.request):
            self._has_room_made = found.request
        return found.request

    def choose(self, waiting: WaitingQueue, *, num_free_seats: int) -> None:
        """Choose the long prompt to serve first: a running one, or one that finds a free seat."""
        if self._is_resting or self._is_lifted:
            return
        entries = self._list_entries(waiting)
        found = self._find(
            entry
            for entry in entries
            if entry.request not in waiting.long
            or self._finds_seat(entry.request, waiting, num_free_seats)
        )
        if self._is_turn_of_first:
            first = self._find(entries)
            if first is None or first.request is not self._claimer:
                self._claimer = None
            self._next_claimer = None if first is None or first is found else first.request
        if found is not None:
            self._chosen = found.request
            self._num_for_chosen = min(self._num_spare, found.num_left)
            self._num_spare -= self._num_for_chosen

    def _list_entries(self, waiting: WaitingQueue) -> list[_Entry]:
        """Return the long prompts that run, and those that may start in this turn."""
        queue = waiting.long
        running = [
            _Entry(_get_num_left(request), queue.get_order(request), request)
            for request in self._running.values()
        ]
        first = self._shares.get_next(queue.firsts)
        shortest = self._shares.get_next(queue.shortest)
        if first is None or shortest is None:
            return running
        claimer = self._get_claimer(queue)
        candidates = []
        if self._is_turn_of_first or first.request_id == self._kept_by:
            candidates.append(first)
        elif claimer is not None:
            candidates.append(claimer)
        length = queue.get_length(shortest)
        if (self._is_turn_of_first or claimer is None) and all(
            length <= num_left // 2 or shortest.rank[0] < request.rank[0]
            for num_left, _, request in running
        ):
            candidates.append(shortest)
        return [
            *running,
            *(_Entry(queue.get_length(each), queue.get_order(each), each) for each in candidates),
        ]

    def _get_claimer(self, queue: LongQueue) -> Request | None:
        """Return the waiting long prompt that the next free seat is for, or `None`."""
        claimer = self._claimer
        if claimer is None or claimer not in queue or not self._shares.is_entitled(claimer):
            return None
        is_urgent = all(claimer.rank[0] <= first.rank[0] for first in islice(queue, 1))
        return claimer if is_urgent else None

    def _find(self, entries: Iterable[_Entry]) -> _Entry | None:
        """Return the long prompt that this turn serves first, or `None` if `entries` is empty."""
        entries = list(entries)
        kept = [entry for entry in entries if entry.request.request_id == self._kept_by]
        key = _get_order if self._is_turn_of_first else _get_length
        return min(kept or entries, key=key, default=None)

    def _finds_seat(self, request: Request, waiting: WaitingQueue, num_free_seats: int) -> bool:
        """Return whether a waiting long prompt finds a free seat that is not meant for another."""
        is_entitled = self._shares.is_entitled(request)
        if is_entitled and request in (self._has_room_made, self._get_claimer(waiting.long)):
            return num_free_seats > 0
        first = self._shares.get_next(waiting.long.firsts)
        if first is not None and self._shares.is_entitled(first) and not is_entitled:
            return False
        others = waiting.iterate_with(None)
        return self._shares.count_entitled(others, most=num_free_seats) < num_free_seats

    def list_startable(self, waiting: WaitingQueue, *, num_free_seats: int) -> Iterator[Request]:
        """Return the waiting requests that may start now, in the order of service."""
        if self._is_lifted:
            return iter(waiting)
        request = self._chosen
        claimer = self._get_claimer(waiting.long)
        if request is None or request not in waiting.long:
            is_free = self._num_spare > 0 and not any(map(_has_prompt_left, self._running.values()))
            is_next = is_free and not self._is_resting
            request = claimer or (self._shares.get_next(waiting.long.firsts) if is_next else None)
        if request is not None and not self._finds_seat(request, waiting, num_free_seats):
            request = None
        startable = waiting.iterate_with(request)
        if claimer is None or claimer is request or num_free_seats > 1:
            return startable
        before = takewhile(lambda other: other.rank < claimer.rank, startable)
        return filter(self._shares.is_entitled, before)

    def get_most(self, request: Request, start: int) -> int:
        """Return how many tokens of a request, from `start` on, these rules allow in the step."""
        is_long = request.request_id in self._running or self.is_long(request, start)
        if not is_long or self._is_lifted:
            return self._max_num_tokens
        most = 0
        if not self._is_resting:
            most = self._num_for_chosen if request is self._chosen else self._num_spare
        if request is self._claimer and request.request_id not in self._running:
            most = max(1, most)
        self._has_refused |= most == 0
        return most

    def note_tokens(self, request: Request, num_tokens: int) -> None:
        """Record that the step computes tokens of a request, whether its prompt is long or not."""
        if request.request_id in self._running:
            self._num_computed += num_tokens
            if request is not self._chosen:
                self._num_spare = max(0, self._num_spare - num_tokens)

    def keep_turn(self, request: Request) -> None:
        """Record that a request got no tokens of the step, although these rules allowed some."""
        if request is self._chosen:
            self._keeper = request.request_id

    @property
    def is_limiting(self) -> bool:
        """Whether these rules may have denied a long prompt tokens of this step."""
        return (self._has_refused or self._is_resting) and not self._is_lifted

    def lift(self) -> None:
        """Plan this step once more, without these rules."""
        self._is_lifted = True

    def end_step(self, *, has_tokens: bool) -> None:
        """Update the state for the next steps; `has_tokens` is False if this step is empty."""
        if self._num_computed:
            num_steps = -(-self._pause * self._num_computed // self._threshold)
            self._num_steps_to_rest = min(self._pause, self._num_steps_to_rest + num_steps)
            self._most_alone = min(2 * self._most_alone, self._max_num_tokens)
        elif self._is_resting and has_tokens:
            self._num_steps_to_rest -= 1
        # The turn also passes on if the chosen prompt could not start. So a prompt that lacks
        # blocks does not hold up the running ones.
        if self._chosen is not None and self._keeper is None:
            self._is_turn_of_first = not self._is_turn_of_first
        self._kept_by = self._keeper
        self._claimer = self._next_claimer
        self._is_lifted = False


def _get_num_left(request: Request) -> int:
    return request.num_ready_tokens - request.num_scheduled_tokens


def _has_prompt_left(request: Request) -> bool:
    return _get_num_left(request) > 1  # the last one costs no more than a decoded token


def _get_order(entry: _Entry) -> tuple[int, ...]:
    return entry.order


def _get_length(entry: _Entry) -> tuple[int, ...]:
    """Return a sort key by length, with the more urgent prompts first."""
    priority, *place = entry.order
    return priority, entry.num_left, *place
