"""Keeps the requests with streaming audio that wait for more audio.

Such a request counts as running, but no step has work for it. Audio may stream for hours. So tokens
that no layer attends to any more are dropped, and a request's cost does not depend on its age.
"""

from __future__ import annotations

from sensorium.core.admission import Limits
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.request import Request
from sensorium.types.errors import CapacityError


class OpenStreams:
    """A record of the requests that wait for audio, and of the tokens that requests dropped."""

    def __init__(self, kv_cache: KVCacheManager, *, max_num_open: int) -> None:
        self._kv_cache = kv_cache
        self._max_num_open = max_num_open  # requests at a time
        self._open: set[str] = set()  # ids of all requests with a reserved seat
        self._waiting: dict[str, Request] = {}
        self._dropped: list[tuple[str, int]] = []
        # Whether other requests can't run before one of the waiting ones continues or ends.
        self.hold_up_others = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def admit(self, request: Request, limits: Limits) -> None:
        """Reserve a seat and blocks for a request, or raise `CapacityError` if too few are left."""
        if len(self._open) >= self._max_num_open:
            raise CapacityError(
                f"{len(self._open)} audio streams are open, and more would leave no place "
                "for other requests: try again later, or start the engine with a larger "
                "max_num_seqs"
            )
        self._kv_cache.reserve(request, limits.max_model_len, limits.max_num_batched_tokens)
        self._open.add(request.request_id)

    def add(self, request: Request) -> None:
        """Let a request wait for more of its audio."""
        self._waiting[request.request_id] = request

    def remove(self, request_id: str) -> bool:
        """Let a request wait no longer, and return whether it waited."""
        self.hold_up_others = False
        return self._waiting.pop(request_id, None) is not None

    def forget(self, request_id: str) -> bool:
        """Give back the seat of a request that ends, and return whether it waited for audio."""
        self._open.discard(request_id)
        return self.remove(request_id)

    def note_step(self, *, is_idle: bool) -> None:
        """Record whether the waiting requests hold up the others: they do if a step is idle."""
        self.hold_up_others = is_idle and bool(self._waiting)

    def drop_passed(self, request: Request) -> None:
        """Drop the tokens of a request that no layer attends to any more.

        No step with the request may be under way, because its remaining tokens are renumbered.
        """
        if count := self._kv_cache.drop_passed(request):
            request.drop_tokens(count)
            self._dropped.append((request.request_id, count))

    def take_dropped(self) -> tuple[tuple[str, int], ...]:
        """Return the ids of requests that dropped tokens since the last call, and how many each."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped
