"""What every store of entries promises, wherever the entries lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sensorium.multimodal.cache.interface import CacheStatistics
from sensorium.multimodal.tiers.heads import MAX_ENTRY_BYTES


@dataclass(slots=True, kw_only=True)
class StoreStatistics(CacheStatistics):
    """The counters of a store since this process opened it, and its content at this moment."""

    num_writes: int = 0
    num_damaged: int = 0  # entries that were found damaged, and removed
    num_errors: int = 0  # of the disk or the network


class Store(Protocol):
    """A thread-safe store of named bytes, which may lose any entry but never changes one.

    An error of the store is no error of its user: an entry that can't be read is absent, and one
    that can't be written is not kept.
    """

    @property
    def level(self) -> str:
        """The store's name among the levels of caching, in metrics."""
        ...

    def get(self, name: str, max_bytes: int = MAX_ENTRY_BYTES) -> bytearray | None:
        """Return the content of an entry and mark it as used, or None if there is none intact.

        A damaged entry is removed. One that is longer than written, or than `max_bytes`, counts as
        damaged, and only its head is read.
        """
        ...

    def has(self, name: str) -> bool:
        """Return whether there seems to be an entry of this name."""
        ...

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Write an entry if it fits and is not there yet, and return whether it was written."""
        ...

    def touch(self, name: str) -> None:
        """Mark an entry as used, if there is one."""
        ...

    def remove(self, name: str, *, is_damaged: bool = False) -> None:
        """Remove an entry, if there is one, and count it if it is damaged."""
        ...

    def statistics(self) -> StoreStatistics: ...

    def close(self) -> None: ...
