"""Stops calls to a service for a while after it has failed, so that its users don't wait."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class Breaker:
    """A decision whether a service may be called now, made from how its last calls ended.

    After a failure it gets no calls for a pause. Then one call may try, while all others are still
    refused. If that fails as well, the next pause is twice as long, up to a limit. The first
    failure and the first success after it are logged, and nothing between them. It is thread-safe.
    """

    def __init__(self, service: str, *, failed: str, advice: str, back: str) -> None:
        """Take the words that are logged: "SERVICE FAILED: a reason. ADVICE", "SERVICE BACK"."""
        self._service = service
        self._failed = failed
        self._advice = advice
        self._back = back
        self._lock = threading.Lock()
        self._pause_s = 0.0  # 0: the last call has succeeded
        self._retry_at = 0.0
        self._num_failures = 0  # a call that began before the last failure says nothing new

    @property
    def is_waiting(self) -> bool:
        """Whether the service gets no calls at this moment."""
        with self._lock:
            return self._is_waiting()

    def enter(self, limit_s: float) -> int | None:
        """Return a token for one call, or None if the service may not be called now.

        `limit_s` is how long the call may take. Its end must be reported with the token, unless the
        call was never made.
        """
        with self._lock:
            if self._is_waiting():
                return None
            if self._pause_s:
                self._retry_at = time.monotonic() + limit_s  # the others wait for this call
            return self._num_failures

    def note_success(self, token: int) -> None:
        with self._lock:
            if token != self._num_failures or not self._pause_s:
                return
            self._pause_s = 0.0
        logger.info("%s %s", self._service, self._back)

    def note_failure(self, token: int, reason: str) -> None:
        with self._lock:
            if token != self._num_failures:
                return
            self._num_failures += 1
            is_first = not self._pause_s
            self._pause_s = min(2 * self._pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            self._retry_at = time.monotonic() + self._pause_s
        if is_first:
            logger.warning("%s %s: %s. %s", self._service, self._failed, reason, self._advice)

    def _is_waiting(self) -> bool:
        return self._pause_s > 0 and time.monotonic() < self._retry_at
