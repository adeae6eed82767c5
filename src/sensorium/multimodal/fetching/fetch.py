"""One item on its way from a host: what the client called that host, and the time that is left."""

from __future__ import annotations

import time

from sensorium.multimodal.fetching.fetch_memory import RequestBytes
from sensorium.multimodal.fetching.refusal import RefusalReason, RefusedMediaError


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
        """Return the refusal of an item whose time, or whose request's time, is over."""
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
