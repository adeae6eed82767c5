"""Keeps the requests that have heard all of their sound so far, and wait for more of it.

Such a request is running, but no step has work for it. A sound may go on for hours. So what a
request has passed for good is forgotten, and its cost does not depend on its age.
"""

from __future__ import annotations

from sensorium.core.admission import Limits
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.request import Request
from sensorium.types.errors import CapacityError


class OpenStreams:
    """The requests that wait for more of their sound, and the tokens that requests have forgotten.

    `max_num_open` is the most requests with an open sound at a time.
    """

    def __init__(self, kv_cache: KVCacheManager, *, max_num_open: int) -> None:
        self._kv_cache = kv_cache
        self._max_num_open = max_num_open
        self._open: set[str] = set()  # the ids of all requests that have a seat set aside
        self._waiting: dict[str, Request] = {}
        self._dropped: list[tuple[str, int]] = []
        # Whether others can't run before one of these goes on or ends.
        self.hold_up_others = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def admit(self, request: Request, limits: Limits) -> None:
        """Set a seat and blocks aside for a request with an open sound, until `forget`.

        Raise a `CapacityError` if others have taken all that may be set aside.
        """
        if len(self._open) >= self._max_num_open:
            raise CapacityError(
                f"{len(self._open)} sounds are being listened to, and more would leave no place "
                "for other requests: try again later, or start the engine with a larger "
                "max_num_seqs"
            )
        self._kv_cache.reserve(request, limits.max_model_len, limits.max_num_batched_tokens)
        self._open.add(request.request_id)

    def add(self, request: Request) -> None:
        """Let a request wait for more of its sound."""
        self._waiting[request.request_id] = request

    def remove(self, request_id: str) -> bool:
        """Let a request wait no longer, and return whether it has waited."""
        self.hold_up_others = False
        return self._waiting.pop(request_id, None) is not None

    def forget(self, request_id: str) -> bool:
        """Give back what a request had set aside, and return whether it has waited."""
        self._open.discard(request_id)
        return self.remove(request_id)

    def note_step(self, *, is_idle: bool) -> None:
        """Note whether nothing runs although a step was planned.

        Then those that wait here have all seats or blocks that others need.
        """
        self.hold_up_others = is_idle and bool(self._waiting)

    def drop_passed(self, request: Request) -> None:
        """Forget the tokens of a request that no layer attends to any more.

        No step with the request may be under way, because the other tokens are renumbered.
        """
        if count := self._kv_cache.drop_passed(request):
            request.drop_tokens(count)
            self._dropped.append((request.request_id, count))

    def take_dropped(self) -> tuple[tuple[str, int], ...]:
        """Return the requests that forgot tokens since the last call, and how many each forgot."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped
