"""The cache of processed items that one process keeps for itself, within a number of bytes.

It serves requests that only render or tokenise: a repeated one decodes nothing, and the order of
the cache that leads a core is not disturbed. `mirror.MirrorSender` extends it to lead a core.

Invariants:
  1. The entries together have at most `capacity_bytes`.
  2. An entry that a handle was given for is not evicted before the handle is released.
  3. Of the other entries the least recently used is evicted first. The release of the last handle
     is a use.
  4. There is one query for each handle that was given out. It is a hit if no item was needed.
  5. Without a capacity nothing is kept and nothing is counted: every item travels with its request.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Generic, TypeVar

from sensorium.multimodal.cache.interface import CacheStatistics, ItemHandle
from sensorium.multimodal.item_codec import get_num_bytes
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem, ProcessedItem

_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class LruEntry:
    """An entry of a `ByteLru`."""

    key: str
    num_bytes: int
    # A pin belongs to an entry and not to its key: what was removed and added anew has none.
    num_pins: int = 0


EntryT = TypeVar("EntryT", bound=LruEntry)


class ByteLru(Generic[EntryT]):
    """The sizes, pins and order of use of entries. It is not safe to use from several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._entries: dict[str, EntryT] = {}
        self._evictable: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._num_pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[EntryT]:
        return iter(self._entries.values())

    def get(self, key: str) -> EntryT | None:
        return self._entries.get(key)

    def can_add(self, num_bytes: int) -> bool:
        """Return True if there is room, or would be after evicting everything without a pin."""
        return num_bytes <= self.capacity_bytes - self._num_pinned_bytes

    def add(self, entry: EntryT) -> list[EntryT]:
        """Keep a new entry, which has no pin yet. Return the entries that were evicted for it."""
        if entry.key in self._entries or entry.num_pins or not self.can_add(entry.num_bytes):
            raise InvariantError(f"{entry.key} is kept already, or does not fit")
        victims = []
        # It ends: what has no pin is enough, by `can_add`.
        while self.num_bytes > self.capacity_bytes - entry.num_bytes:
            victims.append(self._entries[next(iter(self._evictable))])
            self.remove(victims[-1])
        self._entries[entry.key] = entry
        self._evictable[entry.key] = None
        self.num_bytes += entry.num_bytes
        return victims

    def pin(self, entry: EntryT) -> None:
        """Keep the entry from being evicted until as many calls of `unpin`."""
        entry.num_pins += 1
        if entry.num_pins == 1 and self._is_kept(entry):
            del self._evictable[entry.key]
            self._num_pinned_bytes += entry.num_bytes

    def unpin(self, entry: EntryT) -> None:
        """Take back one pin. Without any, the entry is the most recently used."""
        if not entry.num_pins:
            raise InvariantError(f"{entry.key} has no pin to lose")
        entry.num_pins -= 1
        if not entry.num_pins and self._is_kept(entry):
            self._evictable[entry.key] = None
            self._num_pinned_bytes -= entry.num_bytes

    def remove(self, entry: EntryT) -> None:
        """Forget an entry that is kept, pinned or not."""
        del self._entries[entry.key]
        self.num_bytes -= entry.num_bytes
        if entry.num_pins:
            self._num_pinned_bytes -= entry.num_bytes
        else:
            del self._evictable[entry.key]

    def _is_kept(self, entry: EntryT) -> bool:
        return self._entries.get(entry.key) is entry


@dataclass(slots=True, kw_only=True, eq=False)
class ItemEntry(LruEntry):
    """An item that is kept. Its key is the `mm_hash`."""

    modality: str
    layout: ItemLayout | None
    kwargs: MultiModalKwargsItem | None  # None: only the core has the tensors
    sent_in: int | None = None  # number of the message that took the tensors to the core

    @property
    def mm_hash(self) -> str:
        return self.key


class ItemTable:
    """A `ProcessorCache` in this process. It is safe to use from several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self._lock = RLock()  # of everything below, and of what subclasses add
        self._lru: ByteLru[ItemEntry] = ByteLru(capacity_bytes)
        # Handle -> the entry that it pins; None: there was no room for one.
        self._held: dict[ItemHandle, ItemEntry | None] = {}
        self._num_queries = 0
        self._num_hits = 0
        self._num_evictions = 0
        self._num_resends = 0
        self._num_oversize = 0
        self._was_warned = False

    @property
    def num_handles(self) -> int:
        """Return the number of handles that were given out and not released."""
        with self._lock:
            return len(self._held)

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        with self._lock:
            return _can_serve(self._lru.get(mm_hash), needs_layout)

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        if item is not None and item.mm_hash != mm_hash:
            raise InvariantError(f"item {item.mm_hash} was given for {mm_hash}")
        with self._lock:
            entry = self._lru.get(mm_hash)
            is_hit = _can_serve(entry, needs_layout)
            if not is_hit:
                if item is None:
                    return None
                if entry is None:
                    entry = self._keep(item)
            if entry is not None and entry.layout is None and item is not None:
                entry.layout = item.layout
            self._num_queries += 1
            self._num_hits += is_hit
            handle = _make_handle(entry, item, is_hit)
            self._held[handle] = None
            self._bind(handle, entry)
            return handle

    def release(self, handles: Iterable[ItemHandle]) -> None:
        with self._lock:
            for handle in handles:
                if handle not in self._held:
                    raise InvariantError(f"a handle of {handle.mm_hash} was released twice")
                self._bind(handle, None)
                del self._held[handle]

    def clear_cache(self) -> None:
        with self._lock:
            self._forget(tuple(self._lru))

    def statistics(self) -> CacheStatistics:
        with self._lock:
            if not self._lru.capacity_bytes:
                return CacheStatistics()
            return CacheStatistics(
                num_queries=self._num_queries,
                num_hits=self._num_hits,
                num_evictions=self._num_evictions,
                num_resends=self._num_resends,
                num_oversize=self._num_oversize,
                num_items=len(self._lru),
                num_bytes=self._lru.num_bytes,
                capacity_bytes=self._lru.capacity_bytes,
            )

    def _rebind(self, handles: Sequence[ItemHandle]) -> None:
        """Let each handle pin what is kept under its hash now.

        An item that is no longer kept is kept again if its handle has the tensors and there is
        room.
        """
        if any(handle not in self._held for handle in handles):
            raise InvariantError("a handle was released before its item was sent")
        # All pins first: keeping one item again must not evict another of the same request.
        for handle in handles:
            self._bind(handle, self._lru.get(handle.mm_hash))
        for handle in handles:
            if self._held[handle] is None and handle.kwargs is not None:
                entry = self._lru.get(handle.mm_hash)
                if entry is None and self._has_room(handle.num_bytes):
                    entry = self._add(handle, handle.kwargs, handle.num_bytes)
                self._bind(handle, entry)

    def _keep(self, item: ProcessedItem) -> ItemEntry | None:
        num_bytes = get_num_bytes(item.kwargs)
        if not self._has_room(num_bytes):
            self._num_oversize += 1
            self._warn_if_too_large(num_bytes)
            return None
        return self._add(item, own_tensors(item.kwargs), num_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        return self._lru.capacity_bytes > 0 and self._lru.can_add(num_bytes)

    def _add(
        self, item: ProcessedItem | ItemHandle, kwargs: MultiModalKwargsItem, num_bytes: int
    ) -> ItemEntry:
        entry = ItemEntry(
            key=item.mm_hash,
            num_bytes=num_bytes,
            modality=item.modality,
            layout=item.layout,
            kwargs=kwargs,
        )
        victims = self._lru.add(entry)
        self._num_evictions += len(victims)
        self._note_removals(victims)
        return entry

    def _forget(self, entries: Iterable[ItemEntry]) -> None:
        for entry in entries:
            self._lru.remove(entry)
            self._note_removals([entry])

    def _note_removals(self, entries: Iterable[ItemEntry]) -> None:
        """Do what has to be done for entries that are no longer kept: nothing, without a core."""

    def _warn_if_too_large(self, num_bytes: int) -> None:
        capacity_bytes = self._lru.capacity_bytes
        if 0 < capacity_bytes < num_bytes and not self._was_warned:
            self._was_warned = True
            _logger.warning(
                "An item of %d bytes is larger than the cache (%d bytes). It is served uncached, "
                "and so are others of that size.",
                num_bytes,
                capacity_bytes,
            )

    def _bind(self, handle: ItemHandle, entry: ItemEntry | None) -> None:
        """Let the handle pin this entry in place of the one that it pinned before."""
        previous = self._held[handle]
        self._held[handle] = entry
        if entry is not None:
            self._lru.pin(entry)
        if previous is not None:
            self._lru.unpin(previous)


def own_tensors(kwargs: MultiModalKwargsItem) -> MultiModalKwargsItem:
    """Return the same item with a copy of each tensor that is a part of a larger one.

    So a cache holds no more memory than it counts. The size of foreign memory behind a view
    (`torch.frombuffer`) can't be seen here: each item needs a block of its own, as `item_codec`
    gives it.
    """
    return {
        name: tensor if tensor.untyped_storage().nbytes() <= tensor.nbytes else tensor.clone()
        for name, tensor in kwargs.items()
    }


def _can_serve(entry: ItemEntry | None, needs_layout: bool) -> bool:
    return entry is not None and (entry.layout is not None or not needs_layout)


def _make_handle(entry: ItemEntry | None, item: ProcessedItem | None, is_hit: bool) -> ItemHandle:
    """Return a handle of the entry, with the item's tensors if the entry has none."""
    source = entry or item
    if source is None:
        raise InvariantError("a handle needs an entry or an item")
    kwargs = source.kwargs
    if kwargs is None and item is not None:
        kwargs = item.kwargs
    return ItemHandle(
        modality=source.modality,
        mm_hash=source.mm_hash,
        layout=source.layout,
        num_bytes=get_num_bytes(source.kwargs or {}) if entry is None else entry.num_bytes,
        is_hit=is_hit,
        kwargs=kwargs,
    )
