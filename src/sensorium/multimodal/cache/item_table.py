"""A cache of processed items for one process alone, with a limit on its size in bytes.

It serves requests that only render or tokenise: a repeated request decodes nothing, and the order
of eviction in the core's cache is not disturbed. `mirror.MirrorSender` extends this class, and
decides what the core's cache keeps.

Invariants:
  1. The entries together have at most `capacity_bytes`.
  2. An entry is not evicted while a handle for it is unreleased.
  3. Of the other entries the least recently used is evicted first. The release of the last handle
     is a use.
  4. Each handle that is given out counts as one query, and as a hit if the cache had the item.
  5. With a capacity of 0 nothing is kept or counted: every item travels with its request.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import RLock

from sensorium.multimodal.cache.interface import CacheStatistics, ItemHandle
from sensorium.multimodal.item_codec import get_num_bytes
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem, ProcessedItem

_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class ItemEntry:
    """A processed item in a cache, or one that did not fit but that a request still holds."""

    modality: str
    mm_hash: str
    layout: ItemLayout | None
    num_bytes: int
    kwargs: MultiModalKwargsItem | None  # None: only the core has the tensors
    sent_in: int | None = None  # number of the message that took the tensors to the core
    # The unreleased handles for this entry. A later entry for the same hash has pins of its own.
    num_pins: int = 0


class ByteLru:
    """A table of entries, limited in bytes, that evicts the least recently used unpinned ones."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._entries: dict[str, ItemEntry] = {}
        self._evictable: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._num_pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ItemEntry]:
        return iter(self._entries.values())

    def __contains__(self, entry: ItemEntry) -> bool:
        return self._entries.get(entry.mm_hash) is entry

    def get(self, mm_hash: str) -> ItemEntry | None:
        return self._entries.get(mm_hash)

    def can_add(self, num_bytes: int) -> bool:
        """Return True if `num_bytes` would fit once all entries without a pin are evicted."""
        return num_bytes <= self.capacity_bytes - self._num_pinned_bytes

    def add(self, entry: ItemEntry) -> list[ItemEntry]:
        """Store an entry with its pins, and return the entries that were evicted to make room."""
        if entry.mm_hash in self._entries or not self.can_add(entry.num_bytes):
            raise InvariantError(f"media item {entry.mm_hash} is cached already, or does not fit")
        victims = []
        # The loop ends: `can_add` has found that evicting all entries without a pin is enough.
        while self.num_bytes > self.capacity_bytes - entry.num_bytes:
            victims.append(self._entries[next(iter(self._evictable))])
            self.remove(victims[-1])
        self._entries[entry.mm_hash] = entry
        self.num_bytes += entry.num_bytes
        if entry.num_pins:
            self._num_pinned_bytes += entry.num_bytes
        else:
            self._evictable[entry.mm_hash] = None
        return victims

    def pin(self, entry: ItemEntry) -> None:
        """Keep the entry from being evicted until `unpin` is called as often as `pin`."""
        entry.num_pins += 1
        if entry.num_pins == 1 and entry in self:
            del self._evictable[entry.mm_hash]
            self._num_pinned_bytes += entry.num_bytes

    def unpin(self, entry: ItemEntry) -> None:
        """Remove one pin; after the last, the entry is evictable, as the most recently used."""
        if not entry.num_pins:
            raise InvariantError(f"media item {entry.mm_hash} is unpinned, but has no pin")
        entry.num_pins -= 1
        if not entry.num_pins and entry in self:
            self._evictable[entry.mm_hash] = None
            self._num_pinned_bytes -= entry.num_bytes

    def remove(self, entry: ItemEntry) -> None:
        """Remove an entry from the table, whether it is pinned or not."""
        del self._entries[entry.mm_hash]
        self.num_bytes -= entry.num_bytes
        if entry.num_pins:
            self._num_pinned_bytes -= entry.num_bytes
        else:
            del self._evictable[entry.mm_hash]


class ItemTable:
    """A thread-safe `ProcessorCache` in the memory of this process."""

    def __init__(self, capacity_bytes: int) -> None:
        self._lock = RLock()  # of everything below, and of what subclasses add
        self._lru = ByteLru(capacity_bytes)
        # Handle that was not released -> the entry that it pins. The entry may not be in `_lru`:
        # there was no room for it, or the cache was cleared.
        self._held: dict[ItemHandle, ItemEntry] = {}
        self._counts = CacheStatistics(capacity_bytes=capacity_bytes)
        self._was_warned = False

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        with self._lock:
            return self._find(mm_hash, needs_layout) is not None

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        if item is not None and item.mm_hash != mm_hash:
            raise InvariantError(f"media item {item.mm_hash} was given as {mm_hash}")
        with self._lock:
            entry = self._find(mm_hash, needs_layout)
            is_hit = entry is not None
            if item is not None:
                entry = entry or self._lru.get(mm_hash) or self._keep(item)
                entry.layout = entry.layout or item.layout
            if entry is None:
                return None
            handle = ItemHandle(
                modality=entry.modality,
                mm_hash=mm_hash,
                layout=entry.layout,
                num_bytes=entry.num_bytes,
                is_hit=is_hit,
                kwargs=item.kwargs if item and entry.kwargs is None else entry.kwargs,
            )
            self._counts.num_queries += 1
            self._counts.num_hits += is_hit
            self._lru.pin(entry)
            self._held[handle] = entry
            return handle

    def release(self, handles: Iterable[ItemHandle]) -> None:
        with self._lock:
            for handle in handles:
                entry = self._held.pop(handle, None)
                if entry is None:
                    raise InvariantError(f"media item {handle.mm_hash} was released twice")
                self._lru.unpin(entry)

    def clear_cache(self) -> None:
        with self._lock:
            self._forget(tuple(self._lru))

    def statistics(self) -> CacheStatistics:
        with self._lock:
            if not self._lru.capacity_bytes:
                return CacheStatistics()
            return replace(self._counts, num_items=len(self._lru), num_bytes=self._lru.num_bytes)

    def _find(self, mm_hash: str, needs_layout: bool) -> ItemEntry | None:
        entry = self._lru.get(mm_hash)
        return entry if entry and (entry.layout is not None or not needs_layout) else None

    def _rebind(self, handles: Sequence[ItemHandle]) -> None:
        """Make each handle pin the entry that the cache now has for its hash.

        The cache may have been cleared since the handle was made. If it has no entry, the item is
        stored again. If the handle has no tensors or there is no room, it keeps its entry outside
        the cache.
        """
        if any(handle not in self._held for handle in handles):
            raise InvariantError("a handle was released before its media item was sent")
        # All pins first: keeping one item again must not evict another of the same request.
        for handle in handles:
            self._pin_kept(handle)
        for handle in handles:
            is_kept = self._pin_kept(handle)
            if not is_kept and handle.kwargs is not None and self._has_room(handle.num_bytes):
                entry = self._held[handle]
                entry.kwargs, entry.sent_in = handle.kwargs, None
                self._add(entry)

    def _pin_kept(self, handle: ItemHandle) -> bool:
        """Move a handle's pin to the cache's entry for its hash; return False if it has none."""
        entry, previous = self._lru.get(handle.mm_hash), self._held[handle]
        if entry is not None and entry is not previous:
            self._lru.pin(entry)
            self._lru.unpin(previous)
            self._held[handle] = entry
        return entry is not None

    def _keep(self, item: ProcessedItem) -> ItemEntry:
        """Return a new entry for the item, which is stored if there is room for it."""
        entry = ItemEntry(
            modality=item.modality,
            mm_hash=item.mm_hash,
            layout=item.layout,
            num_bytes=get_num_bytes(item.kwargs),
            kwargs=item.kwargs,
        )
        if self._has_room(entry.num_bytes):
            entry.kwargs = own_tensors(item.kwargs)
            self._add(entry)
        else:
            self._counts.num_oversize += 1
            self._warn_if_too_large(entry.num_bytes)
        return entry

    def _has_room(self, num_bytes: int) -> bool:
        return self._lru.capacity_bytes > 0 and self._lru.can_add(num_bytes)

    def _add(self, entry: ItemEntry) -> None:
        victims = self._lru.add(entry)
        self._counts.num_evictions += len(victims)
        self._note_removals(victims)

    def _forget(self, entries: Iterable[ItemEntry]) -> None:
        for entry in entries:
            self._lru.remove(entry)
            self._note_removals([entry])

    def _note_removals(self, entries: Iterable[ItemEntry]) -> None:
        """Do nothing here; `MirrorSender` records the entries that the core has to drop."""

    def _warn_if_too_large(self, num_bytes: int) -> None:
        capacity_bytes = self._lru.capacity_bytes
        if 0 < capacity_bytes < num_bytes and not self._was_warned:
            self._was_warned = True
            _logger.warning(
                "A processed media item of %d bytes is larger than the cache (%d bytes). Items "
                "of that size are not cached. To cache them, give a larger mm_processor_cache_gb.",
                num_bytes,
                capacity_bytes,
            )


def own_tensors(kwargs: MultiModalKwargsItem) -> MultiModalKwargsItem:
    """Return the tensors of an item, with a copy of each that is a part of a larger one.

    Without the copy, the cache would keep the whole larger tensor in memory. A tensor of
    `torch.frombuffer` is never copied, because torch does not see the size of its buffer: callers
    must pass a buffer that belongs to this item alone.
    """
    return {
        name: tensor if tensor.untyped_storage().nbytes() <= tensor.nbytes else tensor.clone()
        for name, tensor in kwargs.items()
    }
