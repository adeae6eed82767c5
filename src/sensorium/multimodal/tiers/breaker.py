"""A circuit breaker: after a failure of a service it stops calls to it, so that no caller waits."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class Breaker:
    """A thread-safe circuit breaker, which decides whether a service may be called now.

    After a failure the service gets no calls for a pause. Then one call may try, while all others
    are still refused. If that call fails as well, the next pause is twice as long, up to a limit.
    The first failure and the first success after it are logged, and nothing between them.
    """

    def __init__(self, service: str, *, failed: str, advice: str, back: str) -> None:
        """Take the words of the log lines "SERVICE FAILED: a reason. ADVICE", "SERVICE BACK"."""
        self._service = service
        self._failed = failed
        self._advice = advice
        self._back = back
        self._lock = threading.Lock()
        self._pause_s = 0.0  # 0: the last call has succeeded
        self._retry_at = 0.0
        self._num_failures = 0  # also the token of a call: the end of an older call is ignored

    @property
    def is_waiting(self) -> bool:
        """Whether the service gets no calls at this moment."""
        with self._lock:
            return self._is_waiting()

    def enter(self, limit_s: float) -> int | None:
        """Return a token for one call, or None if the service may not be called now.

        `limit_s` is how long the call may take. Its end must be reported by `note_success` or
        `note_failure` with the token, unless the call was never made.
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
