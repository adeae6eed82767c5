"""Responses to media URLs, kept within a number of bytes.

Owns which response is dropped first: the one that was used least recently. Knows no HTTP beyond
what `freshness` reads from a response's headers.

Invariant: the sizes of all entries add up to `num_bytes`, which never exceeds the capacity.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from sensorium.multimodal.fetching.freshness import (
    compute_fresh_until,
    is_storable,
    make_validators,
)
from sensorium.multimodal.media_bytes import MediaBytes

_KEPT_HEADERS = (
    "age",
    "cache-control",
    "content-type",
    "date",
    "etag",
    "expires",
    "last-modified",
    "vary",
)
# Those that tell of one message, not of the content that it confirms.
_MESSAGE_HEADERS = ("age", "date")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedResponse:
    """`media` is the same object for as long as the host says that it is the same content."""

    media: MediaBytes
    headers: Mapping[str, str]
    fresh_until: float

    @classmethod
    def receive(cls, media: MediaBytes, headers: Mapping[str, str], now: float) -> CachedResponse:
        kept = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
        return cls(media=media, headers=kept, fresh_until=compute_fresh_until(kept, now))

    def confirm(self, headers: Mapping[str, str], now: float) -> CachedResponse:
        """After "not modified": the same content under the headers that came with that answer."""
        lasting = {k: v for k, v in self.headers.items() if k not in _MESSAGE_HEADERS}
        return self.receive(self.media, {**lasting, **headers}, now)

    @property
    def validators(self) -> dict[str, str]:
        return make_validators(self.headers)

    @property
    def num_bytes(self) -> int:
        return len(self.media.data) + sum(map(len, self.headers.values()))

    def is_worth_keeping(self, now: float) -> bool:
        return is_storable(self.headers) and (self.fresh_until > now or bool(self.validators))


class ResponseCache:
    """Thread-safe. `capacity_bytes` 0 keeps nothing."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._entries: OrderedDict[str, CachedResponse] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def touch(self, url: str) -> CachedResponse | None:
        """What is kept for `url`, fresh or not; it becomes the last to be dropped."""
        with self._lock:
            entry = self._entries.get(url)
            if entry is not None:
                self._entries.move_to_end(url)
            return entry

    def replace(self, url: str, response: CachedResponse, now: float) -> None:
        """Forgets what was kept for `url`, and keeps `response` if that may and can be done."""
        num_bytes = len(url) + response.num_bytes
        keeps = num_bytes <= self._capacity_bytes and response.is_worth_keeping(now)
        with self._lock:
            self._remove(url)
            if not keeps:
                return
            while self._num_bytes + num_bytes > self._capacity_bytes:
                self._remove(next(iter(self._entries)))
            self._entries[url] = response
            self._num_bytes += num_bytes

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def _remove(self, url: str) -> None:
        entry = self._entries.pop(url, None)
        if entry is not None:
            self._num_bytes -= len(url) + entry.num_bytes
