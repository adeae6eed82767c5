"""What the fetches of all requests share: deadlines, memory, turns, counters and refusals.

All but the counters are used on one event loop only.

Memory: the bodies that a request has received count until all its fetches have ended. When too many
bytes are held, the request that holds most of them is refused, so that a request with a small
picture never pays for one with a hundred large videos.

Turns: a request always has a fetch under way if it wants one. What it wants beyond that comes out
of a room that all requests share. The server bounds the number of requests.

Texts of refusals may repeat what the client itself sent. They never hold a resolved address, the
target of a redirect, a path on disk or another library's words.

Invariants:
  1. `FetchMemory.num_bytes` is the sum over all requests, including those that were refused but
     have not ended.
  2. A request that waits for a turn has at least one fetch under way.
  3. No request has more than `max_per_request` fetches under way.
  4. There are at most `max_shared` fetches beyond the first of each request.
  5. A free turn goes to the request with the fewest fetches under way, then to the one that has
     waited longest.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from sensorium.types.errors import MediaFetchError

RefusalReason = Literal[
    "malformed",
    "size",
    "empty",
    "local_file",
    "scheme",
    "domain",
    "dns",
    "address",
    "connection",
    "tls",
    "protocol",
    "status",
    "redirects",
    "content_type",
    "content_encoding",
    "deadline",
]


class RefusedMediaError(MediaFetchError):
    """A `MediaFetchError` with the reason under which it is counted."""

    def __init__(self, message: str, reason: RefusalReason) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason


def refuse_above(max_bytes: int, num_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise RefusedMediaError(f"the media is larger than {max_bytes} bytes", "size")


SourceKind = Literal["bytes", "data", "file", "http"]  # given in process; by the kind of a URL
_Event = Literal["fetch", "response_cache_hit", "revalidation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStatistics:
    """Counts of what loading media cost since the start."""

    num_fetches: int  # requests to hosts, including those after redirects
    num_bytes: int  # of the bodies that came
    num_response_cache_hits: int  # answers that needed no request
    num_revalidations: int  # answers that a host confirmed without sending them again
    refusals: Mapping[RefusalReason, int]  # reason -> items
    # kind of source -> bytes of all items, including those of responses that were kept
    loaded_bytes: Mapping[SourceKind, int]


class FetchCounters:
    """Counters of loading media, which several threads may use."""

    def __init__(self) -> None:
        self._events: Counter[_Event] = Counter()
        self._refusals: Counter[RefusalReason] = Counter()
        self._loaded_bytes: Counter[SourceKind] = Counter()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, event: _Event) -> None:
        with self._lock:
            self._events[event] += 1

    def add_bytes(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes

    def add_loaded(self, kind: SourceKind, num_bytes: int) -> None:
        with self._lock:
            self._loaded_bytes[kind] += num_bytes

    def add_refusal(self, reason: RefusalReason) -> None:
        with self._lock:
            self._refusals[reason] += 1

    def statistics(self) -> FetchStatistics:
        with self._lock:
            return FetchStatistics(
                num_fetches=self._events["fetch"],
                num_bytes=self._num_bytes,
                num_response_cache_hits=self._events["response_cache_hit"],
                num_revalidations=self._events["revalidation"],
                refusals=dict(self._refusals),
                loaded_bytes=dict(self._loaded_bytes),
            )


class FetchMemory:
    """The bytes that all requests hold while they fetch."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._requests: dict[RequestBytes, None] = {}

    def join(self, end: Callable[[], object]) -> RequestBytes:
        """Return the account of a new request. `end` is called if the request has to give way."""
        request = RequestBytes(self, end)
        self._requests[request] = None
        return request

    def leave(self, request: RequestBytes) -> None:
        """Forget a request, with all that it held."""
        del self._requests[request]
        self.num_bytes -= request.num_bytes

    def make_room(self) -> None:
        """Refuse the largest requests until the rest holds no more than it may."""
        staying = [request for request in self._requests if not request.is_refused]
        num_bytes = sum(request.num_bytes for request in staying)
        for request in sorted(staying, key=lambda each: each.num_bytes, reverse=True):
            if num_bytes <= self.max_bytes:
                return
            num_bytes -= request.num_bytes
            request.refuse()


class RequestBytes:
    """The bytes that one request holds."""

    def __init__(self, memory: FetchMemory, end: Callable[[], object]) -> None:
        self.num_bytes = 0
        self.is_refused = False
        self._memory = memory
        self._end = end

    def add(self, num_bytes: int) -> None:
        """Count bytes that have come for this request."""
        self.num_bytes += num_bytes
        self._memory.num_bytes += num_bytes
        if self._memory.num_bytes > self._memory.max_bytes:
            self._memory.make_room()

    def refuse(self) -> None:
        """End the fetches of this request."""
        self.is_refused = True
        self._end()

    def release(self) -> None:
        """Count nothing of this request any more. Call this once."""
        self._memory.leave(self)


class RequestDeadline:
    """The end of the time in which all media of one request must have come."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.ends_at = time.monotonic() + seconds

    def remaining_s(self) -> float:
        """Return the seconds that are left, or 0."""
        return max(0.0, self.ends_at - time.monotonic())


class Fetch:
    """A fetch of one item, from the first look-up to the last byte, over all redirects.

    Texts name the host that the client sent, never one that a redirect led to.
    """

    def __init__(
        self,
        host: str,
        deadline_s: float,
        *,
        request: RequestDeadline | None = None,
        held: RequestBytes | None = None,
    ) -> None:
        self.host = host
        self._held = held  # what the whole request holds
        self._deadline_s = deadline_s
        self._ends_at = time.monotonic() + deadline_s
        self._request = request if request and request.ends_at < self._ends_at else None

    def remaining_s(self) -> float:
        """Return the seconds that are left to the item and to its request, or 0."""
        if self._request is not None:
            return self._request.remaining_s()
        return max(0.0, self._ends_at - time.monotonic())

    def add_bytes(self, num_bytes: int) -> None:
        """Count bytes of the item that have come."""
        if self._held is not None:
            self._held.add(num_bytes)

    def expired(self) -> RefusedMediaError:
        """Return the refusal of an item that did not come in its time or in that of its request."""
        if self._request is not None:
            return refuse_late_request(self.host, self._request)
        return self.refusal(f"not delivered within {self._deadline_s:g} s", "deadline")

    def refusal(self, why: str, reason: RefusalReason) -> RefusedMediaError:
        return RefusedMediaError(f"media from {self.host}: {why}", reason)


def refuse_late_request(host: str, deadline: RequestDeadline) -> RefusedMediaError:
    """Return the refusal of an item that did not come in the time of its whole request."""
    return RefusedMediaError(
        f"media from {host}: not delivered within {deadline.seconds:g} s, the limit for all media "
        "of one request together",
        "deadline",
    )


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
        """Begin the fetches that may begin now, of those that wait."""
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
