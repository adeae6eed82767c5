"""One item on its way from a host: what the client called that host, and the time that is left."""

from __future__ import annotations

import time

from sensorium.multimodal.media.refusal import RefusalReason, RefusedMediaError


class Fetch:
    """Lives from the first look-up to the last byte, over all redirects.

    Texts name the host that the client sent, never one that a redirect led to.
    """

    def __init__(self, host: str, deadline_s: float) -> None:
        self.host = host
        self._deadline_s = deadline_s
        self._ends_at = time.monotonic() + deadline_s

    def remaining_s(self) -> float:
        """Above zero; refuses the fetch when nothing is left."""
        remaining_s = self._ends_at - time.monotonic()
        if remaining_s <= 0:
            raise self.expired()
        return remaining_s

    def expired(self) -> RefusedMediaError:
        return self.refusal(f"not delivered within {self._deadline_s:g} s", "deadline")

    def refusal(self, why: str, reason: RefusalReason) -> RefusedMediaError:
        return RefusedMediaError(f"media from {self.host}: {why}", reason)
