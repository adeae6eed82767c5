"""The items that a frontend's cache keeps, the handles that requests have on them, the counters.

Owns entries, pins and counts, for the caches that keep items in this process. Not thread-safe:
its owner has a lock. Knows nothing of a core.

Invariants:
  1. An entry that a handle was given for is not evicted before the handle is released.
  2. One query for each handle that was given out; a hit is one for which no item was needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sensorium.multimodal.cache.interface import CacheStatistics, ItemHandle
from sensorium.multimodal.cache.lru import ByteLru, LruEntry
from sensorium.multimodal.cache.own_tensors import own_tensors
from sensorium.multimodal.item_codec import get_num_bytes
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem, ProcessedItem

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class ItemEntry(LruEntry):
    """`kwargs`: the tensors, or `None` if only the core has them, since message `sent_in`."""

    modality: str
    layout: ItemLayout | None
    kwargs: MultiModalKwargsItem | None
    sent_in: int | None = None


class ItemTable:
    def __init__(self, capacity_bytes: int) -> None:
        self._lru: ByteLru[ItemEntry] = ByteLru(capacity_bytes)
        # With a handle comes the entry that it pins; None: there was no room for one.
        self._held: dict[ItemHandle, ItemEntry | None] = {}
        self._num_queries = 0
        self._num_hits = 0
        self._num_evictions = 0
        self._num_oversize = 0
        self._was_warned = False

    def __iter__(self) -> Iterator[ItemEntry]:
        return iter(self._lru)

    @property
    def num_handles(self) -> int:
        return len(self._held)

    def get(self, mm_hash: str) -> ItemEntry | None:
        return self._lru.get(mm_hash)

    def get_held(self, handle: ItemHandle) -> ItemEntry | None:
        """The entry that the handle pins, if it has one."""
        return self._held[handle]

    def is_cached(self, mm_hash: str, *, needs_layout: bool) -> bool:
        return _can_serve(self._lru.get(mm_hash), needs_layout)

    def acquire(
        self, mm_hash: str, item: ProcessedItem | None, *, needs_layout: bool
    ) -> tuple[ItemHandle | None, list[ItemEntry]]:
        """`get_and_update_item`, and the entries that had to go for the item."""
        if item is not None and item.mm_hash != mm_hash:
            raise InvariantError(f"item {item.mm_hash} was given for {mm_hash}")
        entry = self._lru.get(mm_hash)
        is_hit = _can_serve(entry, needs_layout)
        victims: list[ItemEntry] = []
        if not is_hit:
            if item is None:
                return None, victims
            if entry is None:
                entry, victims = self._keep(item)
        if entry is not None and entry.layout is None and item is not None:
            entry.layout = item.layout
        self._num_queries += 1
        self._num_hits += is_hit
        return self._hold(entry, item, is_hit), victims

    def rebind(self, handles: Sequence[ItemHandle]) -> list[ItemEntry]:
        """Let each handle pin what is kept under its hash now; what is no longer kept, though the
        handle has it, is kept again if there is room. The entries that had to go for it.
        """
        if any(handle not in self._held for handle in handles):
            raise InvariantError("a handle was released before its item was sent")
        for handle in handles:
            self._bind(handle, self._lru.get(handle.mm_hash))
        victims = []
        for handle in handles:
            if self._held[handle] is None and handle.kwargs is not None:
                victims += self._keep_again(handle, handle.kwargs)
        return victims

    def touch(self, mm_hash: str) -> None:
        self._lru.touch(mm_hash)

    def release(self, handles: Iterable[ItemHandle]) -> None:
        for handle in handles:
            if handle not in self._held:
                raise InvariantError(f"a handle of {handle.mm_hash} was released twice")
            entry = self._held.pop(handle)
            if entry is not None:
                self._lru.unpin(entry)

    def remove(self, entry: ItemEntry) -> None:
        self._lru.remove(entry)

    def statistics(self, num_resends: int = 0) -> CacheStatistics:
        return CacheStatistics(
            num_queries=self._num_queries,
            num_hits=self._num_hits,
            num_evictions=self._num_evictions,
            num_resends=num_resends,
            num_oversize=self._num_oversize,
            num_items=len(self._lru),
            num_bytes=self._lru.num_bytes,
            capacity_bytes=self._lru.capacity_bytes,
        )

    def _keep(self, item: ProcessedItem) -> tuple[ItemEntry | None, list[ItemEntry]]:
        num_bytes = get_num_bytes(item.kwargs)
        if not self._lru.can_add(num_bytes):
            self._num_oversize += 1
            self._warn_if_too_large(num_bytes)
            return None, []
        entry = ItemEntry(
            key=item.mm_hash,
            num_bytes=num_bytes,
            modality=item.modality,
            layout=item.layout,
            kwargs=own_tensors(item.kwargs),
        )
        return entry, self._add(entry)

    def _keep_again(self, handle: ItemHandle, kwargs: MultiModalKwargsItem) -> list[ItemEntry]:
        victims: list[ItemEntry] = []
        entry = self._lru.get(handle.mm_hash)
        if entry is None:
            if not self._lru.can_add(handle.num_bytes):
                return victims
            entry = ItemEntry(
                key=handle.mm_hash,
                num_bytes=handle.num_bytes,
                modality=handle.modality,
                layout=handle.layout,
                kwargs=kwargs,
            )
            victims = self._add(entry)
        self._bind(handle, entry)
        return victims

    def _add(self, entry: ItemEntry) -> list[ItemEntry]:
        victims = self._lru.add(entry)
        self._num_evictions += len(victims)
        return victims

    def _warn_if_too_large(self, num_bytes: int) -> None:
        capacity_bytes = self._lru.capacity_bytes
        if num_bytes > capacity_bytes and not self._was_warned:
            self._was_warned = True
            logger.warning(
                "an item of %d bytes is larger than its cache of %d and is served uncached, "
                "as are others like it",
                num_bytes,
                capacity_bytes,
            )

    def _hold(
        self, entry: ItemEntry | None, item: ProcessedItem | None, is_hit: bool
    ) -> ItemHandle:
        handle = _make_handle(entry, item, is_hit)
        self._held[handle] = entry
        if entry is not None:
            self._lru.pin(entry)
        return handle

    def _bind(self, handle: ItemHandle, entry: ItemEntry | None) -> None:
        previous = self._held[handle]
        self._held[handle] = entry
        if entry is not None:
            self._lru.pin(entry)
        if previous is not None:
            self._lru.unpin(previous)


def _can_serve(entry: ItemEntry | None, needs_layout: bool) -> bool:
    return entry is not None and (entry.layout is not None or not needs_layout)


def _make_handle(entry: ItemEntry | None, item: ProcessedItem | None, is_hit: bool) -> ItemHandle:
    """Of the entry, with the item's tensors where the entry has none."""
    if entry is not None:
        kwargs = entry.kwargs
        if kwargs is None and item is not None:
            kwargs = item.kwargs
        return ItemHandle(
            modality=entry.modality,
            mm_hash=entry.key,
            layout=entry.layout,
            num_bytes=entry.num_bytes,
            is_hit=is_hit,
            kwargs=kwargs,
        )
    if item is None:
        raise InvariantError("a handle needs an entry or an item")
    return ItemHandle(
        modality=item.modality,
        mm_hash=item.mm_hash,
        layout=item.layout,
        num_bytes=get_num_bytes(item.kwargs),
        is_hit=is_hit,
        kwargs=item.kwargs,
    )
