"""How many bytes the fetches of all requests may hold, and which request gives way.

Used on one event loop only. The bodies that a request has received count until all its fetches
have ended. When too many bytes are held, the request that holds most of them is refused: a request
with a small picture never pays for one with a hundred large videos.

Invariant: `num_bytes` is the sum over all requests, those that were refused but have not ended
included.
"""

from __future__ import annotations

from collections.abc import Callable


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
