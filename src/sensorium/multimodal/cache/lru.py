"""Accounting of a cache that is bounded in bytes: what is kept, what is pinned, and who has to go.

Owns sizes, pins and the order of eviction. Knows nothing of what an entry holds.

Invariants:
  1. The entries together have at most `capacity_bytes`.
  2. An entry with a pin is never evicted.
  3. Of the others, the least recently used goes first; the end of the last pin is a use.
  4. A pin belongs to an entry, not to its key: what was removed and added anew has none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from sensorium.types.errors import InvariantError


@dataclass(slots=True, kw_only=True, eq=False)
class LruEntry:
    key: str
    num_bytes: int
    num_pins: int = 0


EntryT = TypeVar("EntryT", bound=LruEntry)


class ByteLru(Generic[EntryT]):
    """Not thread-safe: its owner has a lock."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._entries: dict[str, EntryT] = {}
        self._evictable: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._num_pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[EntryT]:
        return iter(self._entries.values())

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, key: str) -> EntryT | None:
        return self._entries.get(key)

    def can_add(self, num_bytes: int) -> bool:
        """Whether there is room, or would be once all that has no pin is evicted."""
        return num_bytes <= self.capacity_bytes - self._num_pinned_bytes

    def add(self, entry: EntryT) -> list[EntryT]:
        """Keep a new entry, which has no pin yet. Who had to go for it."""
        if entry.key in self._entries or entry.num_pins or not self.can_add(entry.num_bytes):
            raise InvariantError(f"{entry.key} is kept already, or does not fit")
        victims = self._evict(self.capacity_bytes - entry.num_bytes)
        self._entries[entry.key] = entry
        self._evictable[entry.key] = None
        self._num_bytes += entry.num_bytes
        return victims

    def touch(self, key: str) -> None:
        """Make it the most recently used, if it is there."""
        if key in self._evictable:
            self._evictable.move_to_end(key)

    def pin(self, entry: EntryT) -> None:
        entry.num_pins += 1
        if entry.num_pins == 1 and self._is_kept(entry):
            del self._evictable[entry.key]
            self._num_pinned_bytes += entry.num_bytes

    def unpin(self, entry: EntryT) -> None:
        if not entry.num_pins:
            raise InvariantError(f"{entry.key} has no pin to lose")
        entry.num_pins -= 1
        if not entry.num_pins and self._is_kept(entry):
            self._evictable[entry.key] = None
            self._num_pinned_bytes -= entry.num_bytes

    def remove(self, entry: EntryT) -> None:
        """Forget an entry that is kept, pinned or not."""
        del self._entries[entry.key]
        self._num_bytes -= entry.num_bytes
        if entry.num_pins:
            self._num_pinned_bytes -= entry.num_bytes
        else:
            del self._evictable[entry.key]

    def _evict(self, max_bytes: int) -> list[EntryT]:
        """Until no more than `max_bytes` are left."""
        victims = []
        while self._num_bytes > max_bytes:
            victim = self._entries[next(iter(self._evictable))]
            self.remove(victim)
            victims.append(victim)
        return victims

    def _is_kept(self, entry: EntryT) -> bool:
        return self._entries.get(entry.key) is entry
