"""Which fetches may run at the same time, so that no request waits for the fetches of another.

Used on one event loop only. A request always has a fetch under way if it wants one, however many
others do; what it wants beyond that comes out of a room that all requests share. How many requests
there are is bounded by the server.

Invariants:
  1. A request that waits for a turn has at least one fetch under way.
  2. No request has more than `max_per_request` fetches under way.
  3. Fetches beyond the first of each request number at most `max_shared`.
  4. A free turn goes to the request with the fewest fetches under way, then to the one that has
     waited longest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class FetchShares:
    """The turns of all requests that fetch at this moment."""

    def __init__(self, *, max_per_request: int = 8, max_shared: int = 256) -> None:
        self.max_per_request = max_per_request
        self.max_shared = max_shared
        self.num_shared = 0  # fetches under way beyond the first of each request
        self._waiting: dict[RequestShare, None] = {}  # requests that wait, the longest first

    def join(self) -> RequestShare:
        """Return the share of a new request."""
        return RequestShare(self)

    def may_begin(self, share: RequestShare) -> bool:
        """Return True if the request may begin another fetch now."""
        if share.num_active == 0:
            return True
        return share.num_active < self.max_per_request and self.num_shared < self.max_shared

    def set_waiting(self, share: RequestShare, *, is_waiting: bool) -> None:
        """Note whether any fetch of the request waits for its turn."""
        if is_waiting:
            self._waiting.setdefault(share)
        else:
            self._waiting.pop(share, None)

    def give_turns(self) -> None:
        """Let fetches begin that waited, as far as there is room."""
        while ready := [share for share in self._waiting if self.may_begin(share)]:
            # `min` takes the first of equals, which has waited longest.
            min(ready, key=lambda share: share.num_active).begin_next()


class RequestShare:
    """The turns of one request. A fetch runs inside `async with share`."""

    def __init__(self, shares: FetchShares) -> None:
        self.num_active = 0
        self._shares = shares
        self._queue: deque[asyncio.Future[None]] = deque()  # its fetches that wait

    async def __aenter__(self) -> None:
        if self._shares.may_begin(self):
            self._add(1)
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._shares.set_waiting(self, is_waiting=True)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # the turn came together with the end
                self._end()
            elif turn in self._queue:
                self._queue.remove(turn)
                self._shares.set_waiting(self, is_waiting=bool(self._queue))
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def begin_next(self) -> None:
        """Give a turn to the fetch that has waited longest."""
        turn = self._queue.popleft()
        # Behind the others: the next free turn is theirs first.
        self._shares.set_waiting(self, is_waiting=False)
        self._shares.set_waiting(self, is_waiting=bool(self._queue))
        if not turn.done():  # else it was cancelled, and its task has not run since
            self._add(1)
            turn.set_result(None)

    def _end(self) -> None:
        self._add(-1)
        self._shares.give_turns()

    def _add(self, change: int) -> None:
        before = max(0, self.num_active - 1)
        self.num_active += change
        self._shares.num_shared += max(0, self.num_active - 1) - before
