"""The interface of all tiers: stores of named entries on disk or in Redis."""

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

    Its methods raise no errors of the disk or the network: an entry that can't be read counts as
    absent, and one that can't be written is not kept.
    """

    @property
    def level(self) -> str:
        """The store's name in metrics: one of `types.multimodal.TIERS`."""
        ...

    def get(self, name: str, max_bytes: int = MAX_ENTRY_BYTES) -> bytearray | None:
        """Return the content of an entry and mark it as used, or None if it is absent or damaged.

        A damaged entry is removed. An entry that is longer than it was written, or longer than
        `max_bytes`, counts as damaged, and only its head is read.
        """
        ...

    def has(self, name: str) -> bool:
        """Return whether there is an entry of this name, without checking that it is intact."""
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
