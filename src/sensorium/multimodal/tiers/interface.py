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
    """A store of named bytes, which may lose any entry at any time but never changes one.

    An error of the store is no error of its user: an entry that can't be read is absent, and one
    that can't be written is not kept. Several threads may use it.
    """

    @property
    def level(self) -> str:
        """The name of the store among the levels of caching, in metrics."""
        ...

    def get(self, name: str, max_bytes: int = MAX_ENTRY_BYTES) -> bytearray | None:
        """Return the content of an entry, or None if there is none that is whole.

        What has more than `max_bytes` is not read, and counts as damaged.
        """
        ...

    def has(self, name: str) -> bool:
        """Return whether there seems to be an entry of this name."""
        ...

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Keep an entry if that is possible, and return whether it is new."""
        ...

    def touch(self, name: str) -> None:
        """Mark an entry as used, if there is one."""
        ...

    def remove(self, name: str, *, is_damaged: bool = False) -> None:
        """Remove an entry, if there is one. One that makes no sense is counted as damaged."""
        ...

    def statistics(self) -> StoreStatistics: ...

    def close(self) -> None: ...
