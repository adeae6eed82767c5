"""A mapping with a limit on its size or weight, which drops its least recently used entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """A thread-safe cache that drops its least recently used entries when it is full.

    The weights of all entries together are at most `capacity`. Without `weigh` each entry weighs 1.
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
        return self._weight

    def get(self, key: K) -> V | None:
        """Return a key's value, and make it the most recently used; `None` if there is no entry."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Store a value under a key, and drop the least recently used entries to make room.

        An earlier value is removed. A value that alone weighs more than the capacity is not stored.
        """
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
