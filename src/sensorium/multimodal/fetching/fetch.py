"""Errors and counters of media fetches, and limits on their memory and number over all requests.

The counters may be used by several threads, and everything else on one event loop only.

Memory: the bodies that a request has received count until all its fetches have ended. When too many
bytes are held, the requests that hold most of them are refused. So a request with a small picture
never suffers from one with a hundred large videos.

Turns: a request can always run one fetch. Each further fetch needs a turn, a permission to begin.
The number of turns is limited for all requests together. The server limits the number of requests.

Texts of refusals may repeat what the client itself sent. They never contain a resolved address, the
target of a redirect, a path on disk or the message of another library.

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
import copy
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from sensorium.multimodal.media import MediaBytes
from sensorium.types.errors import MediaFetchError, RequestError

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
    """An error for a media item that can't or may not be fetched, with a reason for the metrics."""

    def __init__(self, message: str, reason: RefusalReason) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason


def refuse_above(max_bytes: int, num_bytes: int) -> None:
    """Raise `RefusedMediaError` if a media item of `num_bytes` is larger than `max_bytes`."""
    if num_bytes > max_bytes:
        raise RefusedMediaError(
            f"the media is larger than {max_bytes} bytes, which is the limit", "size"
        )


SourceKind = Literal["bytes", "data", "file", "http"]  # bytes in process, or the kind of a URL
_Event = Literal["fetch", "received_byte", "response_cache_hit", "revalidation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStatistics:
    """A snapshot of the counters of media loading, since the start of the process."""

    num_fetches: int  # requests to hosts, including those after redirects
    num_bytes: int  # of all bodies that were received
    num_response_cache_hits: int  # responses that were used again without a request
    num_revalidations: int  # responses that a host confirmed without sending them again
    refusals: Mapping[RefusalReason, int]  # reason -> items
    # kind of source -> bytes of all items, including those of responses that were kept
    loaded_bytes: Mapping[SourceKind, int]


class FetchCounters:
    """Thread-safe counters of media loading: fetches, bytes, cache hits and refusals."""

    def __init__(self) -> None:
        self._events: Counter[_Event] = Counter()
        self._refusals: Counter[RefusalReason] = Counter()
        self._loaded_bytes: Counter[SourceKind] = Counter()
        self._lock = threading.Lock()

    def add(self, event: _Event, count: int = 1) -> None:
        with self._lock:
            self._events[event] += count

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
                num_bytes=self._events["received_byte"],
                num_response_cache_hits=self._events["response_cache_hit"],
                num_revalidations=self._events["revalidation"],
                refusals=dict(self._refusals),
                loaded_bytes=dict(self._loaded_bytes),
            )


class FetchMemory:
    """A limit on the response bytes that all requests together hold while they fetch media."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._requests: dict[RequestBytes, None] = {}

    def join(self, end: Callable[[], object]) -> RequestBytes:
        """Open the account of a new request; `end` is called to stop its fetches on a refusal."""
        request = RequestBytes(self, end)
        self._requests[request] = None
        return request

    def leave(self, request: RequestBytes) -> None:
        """Close the account of a request exactly once, after its fetches have ended."""
        del self._requests[request]
        self.num_bytes -= request.num_bytes

    def make_room(self) -> None:
        """Refuse the requests with the most bytes, until the others hold at most `max_bytes`."""
        staying = [request for request in self._requests if not request.is_refused]
        num_bytes = sum(request.num_bytes for request in staying)
        for request in sorted(staying, key=lambda each: each.num_bytes, reverse=True):
            if num_bytes <= self.max_bytes:
                return
            num_bytes -= request.num_bytes
            request.is_refused = True
            request.end()


@dataclass(eq=False)
class RequestBytes:
    """An account of the bytes of fetched media that one client request holds in memory."""

    memory: FetchMemory
    end: Callable[[], object]  # ends the fetches of this request
    num_bytes: int = 0
    is_refused: bool = False

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` more, and refuse the largest requests if the limit is exceeded."""
        self.num_bytes += num_bytes
        self.memory.num_bytes += num_bytes
        if self.memory.num_bytes > self.memory.max_bytes:
            self.memory.make_room()


class Deadline:
    """A time limit in seconds from its creation; `scope` is appended to the text of the error."""

    def __init__(self, seconds: float, scope: str = "") -> None:
        self._ends_at = time.monotonic() + seconds
        self._text = f"the media was not delivered within {seconds:g} s{scope}"

    def remaining_s(self) -> float:
        """Return the seconds until the deadline, or 0 if it has passed."""
        return max(0.0, self._ends_at - time.monotonic())

    def expired(self) -> RefusedMediaError:
        """Return (do not raise) the error for media that was not received before the deadline."""
        return RefusedMediaError(self._text, "deadline")


@dataclass(frozen=True, slots=True)
class Fetch:
    """The limits of one fetch: its deadline, and the account of bytes that its request holds."""

    deadline: Deadline
    held: RequestBytes  # what the whole request holds


class FetchShares:
    """A limit on concurrent fetches, which decides fairly which request may begin another one."""

    def __init__(self, *, max_per_request: int = 8, max_shared: int = 256) -> None:
        self.max_per_request = max_per_request
        self.max_shared = max_shared
        self.num_shared = 0  # fetches under way beyond the first of each request
        self.waiting: dict[RequestShare, None] = {}  # requests that wait, the longest first

    def may_begin(self, share: RequestShare) -> bool:
        """Return True if the request that owns `share` may begin another fetch now."""
        if share.num_active == 0:
            return True
        return share.num_active < self.max_per_request and self.num_shared < self.max_shared

    def give_turns(self) -> None:
        """Let waiting fetches begin, until the limits allow no more of them."""
        while ready := [share for share in self.waiting if self.may_begin(share)]:
            # `min` takes the first of equals, which has waited longest.
            min(ready, key=lambda share: share.num_active).begin_next()


class RequestShare:
    """The running and waiting fetches of one request.

    Each fetch runs in `async with share`, which waits for its turn.
    """

    def __init__(self, shares: FetchShares) -> None:
        self.num_active = 0
        self._shares = shares
        # The fetches that wait. Cancelled ones stay until their turn would have come.
        self._queue: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._shares.may_begin(self):
            self._add(1)
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._shares.waiting.setdefault(self)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # the turn came just before the cancellation
                await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._add(-1)
        self._shares.give_turns()

    def begin_next(self) -> None:
        """Start the fetch of this request that has waited longest for its turn."""
        turn = self._queue.popleft()
        del self._shares.waiting[self]
        if self._queue:  # the request waits again, behind all others
            self._shares.waiting[self] = None
        if not turn.done():  # otherwise it was cancelled
            self._add(1)
            turn.set_result(None)

    def _add(self, change: int) -> None:
        before = max(0, self.num_active - 1)
        self.num_active += change
        self._shares.num_shared += max(0, self.num_active - 1) - before


Address = tuple[str, str]  # a URL and a modality


class SharedFetches:
    """A table of the running fetches, by which requests for the same media share one fetch.

    The fetch belongs to the request that began it, and is cancelled with it. Then one of the
    waiting requests begins another fetch, so that no request depends on the deadline of another.
    """

    def __init__(self) -> None:
        self.num_waiting = 0  # callers of `get`, including those that fetch
        self._running: dict[Address, asyncio.Future[MediaBytes]] = {}

    async def get(self, key: Address, start: Callable[[], Awaitable[MediaBytes]]) -> MediaBytes:
        """Return the media of `key` or raise its error, from its running fetch or from `start`."""
        self.num_waiting += 1
        try:
            while (running := self._running.get(key)) is not None:
                await asyncio.wait([running])
                if not running.cancelled():  # otherwise its owner gave up before there was a result
                    if (error := running.exception()) is not None:
                        raise copy.copy(error)  # for each caller, because tracebacks grow
                    return running.result()
            return await self._lead(key, start)
        finally:
            self.num_waiting -= 1

    async def _lead(self, key: Address, start: Callable[[], Awaitable[MediaBytes]]) -> MediaBytes:
        running = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            media = await start()
        except RequestError as error:
            # A copy, because the error itself holds this frame, and this frame the future.
            running.set_exception(copy.copy(error))
            running.exception()  # asyncio warns of an exception that no caller has looked at
            raise
        except BaseException:
            running.cancel()
            raise
        finally:
            del self._running[key]
        running.set_result(media)
        return media
