"""Decides which long prompt goes on in a step, and with how many tokens, while others are there.

A prompt is long if more than `threshold` of its tokens are to be computed when it starts. It stays
long until all of them are. A step with many of its tokens takes long, and all others wait for it.
This module only decides, and the scheduler obeys.

Invariants:
  1. While others wait for their first token, long prompts together have at most `threshold` tokens
     of a step, and at most half of it. Only a span that can't be split may be longer.
  2. While others run, at most `pause` steps in which they have work pass between two steps with
     tokens of long prompts: as many for each `threshold` tokens. When the others have gone, who may
     come again, long prompts have few tokens of a step at first, and then twice as many each time.
  3. In such a step one long prompt comes before the other long ones. In turns, this is the first
     in their order (`core.long_prompt_order`), so that none starves, and the one with the fewest
     tokens left.
  4. A long prompt starts beside others only if it comes before them in their order, or has at most
     half of the tokens that each of them has left. So few of them hold seats and blocks.
  5. A prompt that got nothing in its turn for lack of another resource keeps the turn.
  6. Nothing is taken from a prompt for requests that are less urgent.
  7. No long prompt takes a seat that was made free for another request.
  8. Where these rules would leave a step empty, it is planned without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from sensorium.core.long_prompt_order import LongPromptOrder, Order
from sensorium.core.request import Request
from sensorium.core.seat_shares import SeatShares
from sensorium.core.waiting_queue import WaitingQueue

_FIRST_PIECE = 8  # the part of `threshold` that such a prompt begins with when others have gone


class _Entry(NamedTuple):
    """A long prompt that may come first."""

    num_left: int  # tokens to compute
    order: Order
    request: Request


class LongPrompts:
    """Decides how many tokens long prompts get in each step, and which of them comes first.

    With a `threshold` of 0 no prompt is long. `pause` is a number of steps; with 0, long prompts
    take part in every step, and have all of it when they are alone. A step has `max_num_tokens`.
    """

    def __init__(
        self, threshold: int, *, pause: int, max_num_tokens: int, shares: SeatShares
    ) -> None:
        self._shares = shares
        self._order = LongPromptOrder(shares)
        self._threshold = threshold
        self._pause = pause
        self._max_num_tokens = max_num_tokens
        self._running: dict[str, Request] = {}
        self._num_steps_to_rest = 0
        self._least_alone = max(1, threshold // _FIRST_PIECE)
        self._most_alone = self._least_alone  # tokens of a step while no others are there
        self._is_turn_of_first = True  # and not of the shortest
        self._kept_by: str | None = None  # the prompt that keeps its turn
        # Of the present step:
        self._has_room_made: Request | None = None  # waits, and others make room for it
        self._chosen: Request | None = None  # comes before the other long ones
        self._num_for_chosen = 0  # tokens
        self._num_spare = 0  # tokens for all others together
        self._is_resting = False
        self._is_lifted = False
        self._num_computed = 0  # tokens of all of them
        self._has_refused = False
        self._keeper: str | None = None

    def is_long(self, request: Request, num_cached_tokens: int) -> bool:
        """Return whether a request that starts with so many cached tokens has a long prompt."""
        if not self._threshold or request.is_stream:  # the tokens of a stream come one by one
            return False
        return request.num_tokens - num_cached_tokens > self._threshold

    def add(self, request: Request, *, last_arrival: int) -> None:
        """Note that a request with a long prompt runs.

        `last_arrival` is the number of the last request that has come, with a long prompt or not.
        """
        self._running[request.request_id] = request
        self._order.note_start(request, last_arrival)

    def remove(self, request_id: str) -> None:
        """Note that a request does not run any more, whether its prompt is long or not."""
        self._running.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """Note that a request has ended, whether its prompt is long or not."""
        self._order.forget(request_id)

    # ---- planning a step, in the order of these methods

    def begin_step(self, running: Sequence[Request], waiting: WaitingQueue) -> None:
        """Decide whether long prompts take part in a step, and with how many tokens.

        `running` is in the order of service.
        """
        self._running = {r.request_id: r for r in self._running.values() if _has_prompt_left(r)}
        self._order.tidy(waiting)
        self._has_room_made = self._chosen = self._keeper = None
        self._is_resting = self._has_refused = False
        self._num_computed = 0
        self._num_spare = self._max_num_tokens
        ranks = [request.rank for request in self._running.values()]
        if (first := waiting.first_long) is not None:
            ranks.append(first.rank)
        if not ranks:
            self._most_alone = self._least_alone
        if not ranks or self._is_lifted:
            return
        # Nothing is taken from them for requests that are less urgent.
        priority, _ = min(ranks)
        others = [r for r in (waiting.first_short,) if r is not None and r.rank[0] <= priority]
        has_newcomers = bool(others)
        for request in running:
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
        """Return the waiting long prompt for which others may have to make room, or `None`.

        It is the one that would be chosen if there were a free seat.
        """
        if self._is_resting:
            return None
        if self._is_lifted:
            return self._order.find_first(waiting)
        found = self._find(self._list_entries(waiting))
        if found is None or not waiting.is_long(found.request):
            return None
        if self._shares.is_entitled(found.request):
            self._has_room_made = found.request
        return found.request

    def choose(self, waiting: WaitingQueue, *, num_free_seats: int) -> None:
        """Choose the long prompt that comes first in this step.

        It is one of those that run, or one that waits and finds a free seat.
        """
        if self._is_resting or self._is_lifted:
            return
        found = self._find(
            entry
            for entry in self._list_entries(waiting)
            if not waiting.is_long(entry.request)
            or self._finds_seat(entry.request, waiting, num_free_seats)
        )
        if found is not None:
            self._chosen = found.request
            self._num_for_chosen = min(self._num_spare, found.num_left)
            self._num_spare -= self._num_for_chosen

    def _list_entries(self, waiting: WaitingQueue) -> list[_Entry]:
        """Return the long prompts that run, and those that may start in this turn."""
        running = [
            _Entry(_get_num_left(request), self._order.get(request), request)
            for request in self._running.values()
        ]
        first = self._order.find_first(waiting)
        shortest = self._order.find_shortest(waiting)
        if first is None or shortest is None:
            return running
        found = []
        if self._is_turn_of_first or first.request_id == self._kept_by:
            found.append(_Entry(waiting.get_length(first), self._order.get(first), first))
        length = waiting.get_length(shortest)
        if all(
            length <= num_left // 2 or shortest.rank[0] < request.rank[0]
            for num_left, _, request in running
        ):
            found.append(_Entry(length, self._order.get(shortest), shortest))
        return [*running, *found]

    def _find(self, entries: Iterable[_Entry]) -> _Entry | None:
        """Return the one whose turn it is."""
        entries = list(entries)
        kept = [entry for entry in entries if entry.request.request_id == self._kept_by]
        key = _get_order if self._is_turn_of_first else _get_length
        return min(kept or entries, key=key, default=None)

    def _finds_seat(self, request: Request, waiting: WaitingQueue, num_free_seats: int) -> bool:
        """Return whether there is a free seat for a waiting long prompt, and not for another."""
        is_entitled = self._shares.is_entitled(request)
        if is_entitled and request is self._has_room_made:
            return num_free_seats > 0
        first = self._order.find_first(waiting)
        if first is not None and self._shares.is_entitled(first) and not is_entitled:
            return False
        others = waiting.iterate_with(None)
        return self._shares.count_entitled(others, most=num_free_seats) < num_free_seats

    def list_startable(self, waiting: WaitingQueue, *, num_free_seats: int) -> Iterator[Request]:
        """Return the waiting requests that may start now, in the order of service."""
        if self._is_lifted:
            return iter(waiting)
        request = self._chosen
        if request is None or not waiting.is_long(request):
            is_free = self._num_spare > 0 and not any(map(_has_prompt_left, self._running.values()))
            is_first_next = is_free and not self._is_resting
            request = self._order.find_first(waiting) if is_first_next else None
        if request is not None and not self._finds_seat(request, waiting, num_free_seats):
            request = None
        return waiting.iterate_with(request)

    def get_most(self, request: Request, start: int) -> int:
        """Return how many tokens of a request from `start` on the step may have by these rules."""
        is_long = request.request_id in self._running or self.is_long(request, start)
        if not is_long or self._is_lifted:
            return self._max_num_tokens
        most = 0
        if not self._is_resting:
            most = self._num_for_chosen if request is self._chosen else self._num_spare
        self._has_refused |= most == 0
        return most

    def note_tokens(self, request: Request, num_tokens: int) -> None:
        """Note that the step computes tokens of a request, whether its prompt is long or not."""
        if request.request_id in self._running:
            self._num_computed += num_tokens
            if request is not self._chosen:
                self._num_spare = max(0, self._num_spare - num_tokens)

    def keep_turn(self, request: Request) -> None:
        """Note that a request got nothing of the step, although these rules would have let it."""
        if request is self._chosen:
            self._keeper = request.request_id

    @property
    def is_limiting(self) -> bool:
        """Whether these rules may have kept a long prompt from having tokens of this step."""
        return (self._has_refused or self._is_resting) and not self._is_lifted

    def lift(self) -> None:
        """Plan this step once more, without these rules."""
        self._is_lifted = True

    def end_step(self, *, has_tokens: bool) -> None:
        """Remember what matters for the next steps. `has_tokens` tells whether this one has any."""
        if self._num_computed:
            num_steps = -(-self._pause * self._num_computed // self._threshold)
            self._num_steps_to_rest = min(self._pause, self._num_steps_to_rest + num_steps)
            self._most_alone = min(2 * self._most_alone, self._max_num_tokens)
        elif self._is_resting and has_tokens:
            self._num_steps_to_rest -= 1
        # The turn also passes on if a chosen one could not start. So one that lacks blocks does
        # not hold up those that run.
        if self._chosen is not None and self._keeper is None:
            self._is_turn_of_first = not self._is_turn_of_first
        self._kept_by = self._keeper
        self._is_lifted = False


def _get_num_left(request: Request) -> int:
    return request.num_ready_tokens - request.num_scheduled_tokens


def _has_prompt_left(request: Request) -> bool:
    return _get_num_left(request) > 1  # the last one is as a token of any answer


def _get_order(entry: _Entry) -> tuple[int, ...]:
    return entry.order


def _get_length(entry: _Entry) -> tuple[int, ...]:
    """Return what orders the prompts by length: those that are more urgent come first."""
    priority, *place = entry.order
    return priority, entry.num_left, *place
