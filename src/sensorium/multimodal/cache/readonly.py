"""The cache of requests that run no engine, where items lie in shared memory.

It reads what the main cache has there, without a change to its order or its counts, and keeps what
it has to process itself in a cache of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from threading import Lock

from sensorium.multimodal.cache.interface import CacheStatistics, ItemHandle
from sensorium.multimodal.cache.processor_only import ProcessorOnlyCache
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.types.multimodal import ProcessedItem


class SharedReadonlyCache:
    """A `ProcessorCache` whose handles have tensors."""

    def __init__(self, store: ShmStore, own: ProcessorOnlyCache) -> None:
        self._store = store
        self._own = own
        self._lock = Lock()
        self._num_shared_hits = 0

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        if self._own.is_cached(mm_hash, needs_layout=needs_layout):
            return True
        entry = self._store.peek(mm_hash)
        if entry is None:
            return False
        self._store.release(entry.reference)
        return entry.layout is not None or not needs_layout

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        handle = self._own.get_and_update_item(mm_hash, needs_layout=needs_layout)
        if handle is not None:
            return handle
        shared = self._peek(mm_hash, needs_layout=needs_layout)
        if shared is not None:
            return shared
        return self._own.get_and_update_item(mm_hash, item, needs_layout=needs_layout)

    def _peek(self, mm_hash: str, *, needs_layout: bool) -> ItemHandle | None:
        entry = self._store.peek(mm_hash)
        if entry is None:
            return None
        if entry.layout is None and needs_layout:
            self._store.release(entry.reference)
            return None
        with self._lock:
            self._num_shared_hits += 1
        return ItemHandle(
            modality=entry.modality,
            mm_hash=mm_hash,
            layout=entry.layout,
            num_bytes=entry.num_bytes,
            is_hit=True,
            kwargs=self._store.open(entry.reference),
            reference=entry.reference,
        )

    def touch(self, mm_hash: str) -> None:
        self._own.touch(mm_hash)

    def release(self, handles: Iterable[ItemHandle]) -> None:
        for handle in handles:
            if handle.reference is None:
                self._own.release([handle])
            else:
                self._store.release(handle.reference)

    def clear_cache(self) -> None:
        """What the main cache has stays there."""
        self._own.clear_cache()

    def statistics(self) -> CacheStatistics:
        own = self._own.statistics()
        with self._lock:
            shared = self._num_shared_hits
        return replace(own, num_queries=own.num_queries + shared, num_hits=own.num_hits + shared)
