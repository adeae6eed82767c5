"""When a process that has died is started again, and when no more: decisions, no clock."""

from __future__ import annotations

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
MAX_TRIES = 5
SETTLED_S = 60.0


class RestartPolicy:
    """Of one process. Pauses double; a life of `settled_s` makes the next end the first again."""

    def __init__(
        self,
        *,
        max_tries: int = MAX_TRIES,
        first_pause_s: float = FIRST_PAUSE_S,
        max_pause_s: float = MAX_PAUSE_S,
        settled_s: float = SETTLED_S,
    ) -> None:
        self.max_tries = max_tries
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._settled_s = settled_s
        self._num_ends = 0

    def note_end(self, *, lived_s: float) -> float | None:
        """Seconds until the next start. `None`: that was tried often enough."""
        if lived_s >= self._settled_s:
            self._num_ends = 0
        self._num_ends += 1
        if self._num_ends > self.max_tries:
            return None
        return min(self._first_pause_s * 2.0 ** (self._num_ends - 1), self._max_pause_s)
