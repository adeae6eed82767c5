"""One item on its way from a host: what the client called that host, and the time that is left."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, Future

from sensorium.multimodal.media.refusal import RefusalReason, RefusedMediaError

PATIENCE_S = 0.5  # how long a wait may be before it is asked whether to go on


class Fetch:
    """Lives from the first look-up to the last byte, over all redirects.

    Texts name the host that the client sent, never one that a redirect led to. `is_stopping` ends
    it before its time; `cancelled` completes when nobody waits for it any more.
    """

    def __init__(
        self,
        host: str,
        deadline_s: float,
        is_stopping: threading.Event | None = None,
        *,
        cancelled: Future[None] | None = None,
    ) -> None:
        self.host = host
        self._cancelled = cancelled
        self._is_stopping = is_stopping or threading.Event()
        self._deadline_s = deadline_s
        self._ends_at = time.monotonic() + deadline_s

    def remaining_s(self) -> float:
        """Above zero; refuses the fetch when nothing is left. Ask again every `PATIENCE_S`.
        Raises `CancelledError` when nobody waits for it.
        """
        if self._cancelled is not None and self._cancelled.done():
            raise CancelledError
        remaining_s = self._ends_at - time.monotonic()
        if remaining_s <= 0 or self._is_stopping.is_set():
            raise self.expired()
        return remaining_s

    def expired(self) -> RefusedMediaError:
        return self.refusal(f"not delivered within {self._deadline_s:g} s", "deadline")

    def refusal(self, why: str, reason: RefusalReason) -> RefusedMediaError:
        return RefusedMediaError(f"media from {self.host}: {why}", reason)
