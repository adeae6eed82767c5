"""A mapping of bounded weight that drops its least recently used entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """A cache with entries that together weigh at most `capacity`, for several threads.

    Without `weigh` an entry weighs 1, and the capacity is a number of entries.
    """

    def __init__(self, capacity: int, weigh: Callable[[K, V], int] | None = None) -> None:
        self._capacity = capacity
        self._weigh = weigh or (lambda _key, _value: 1)
        self._weight = 0
        self._entries: OrderedDict[K, V] = OrderedDict()  # least recently used first
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def weight(self) -> int:
        """Return what all entries weigh together."""
        return self._weight

    def get(self, key: K) -> V | None:
        """Return the value of a key, which becomes the most recently used; `None` without one."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Set the value of a key, unless it weighs more than the capacity. Drop others for it."""
        weight = self._weigh(key, value)
        with self._lock:
            self._remove(key)
            if weight > self._capacity:
                return
            while self._weight + weight > self._capacity:
                self._remove(next(iter(self._entries)))
            self._entries[key] = value
            self._weight += weight

    def remove(self, key: K) -> None:
        """Forget a key, if it is there."""
        with self._lock:
            self._remove(key)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._weight = 0

    def _remove(self, key: K) -> None:
        value = self._entries.pop(key, None)
        if value is not None:
            self._weight -= self._weigh(key, value)
