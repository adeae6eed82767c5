"""A cache of processed items for one process: tensors and layouts, no core behind it.

For requests that only render or tokenise: a repeated one decodes nothing, and the order of the
cache that leads a core is not disturbed.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from sensorium.multimodal.cache.interface import CacheStatistics, ItemHandle
from sensorium.multimodal.cache.item_table import ItemTable
from sensorium.types.multimodal import ProcessedItem


class ProcessorOnlyCache:
    """A `ProcessorCache`; its handles always have their tensors."""

    def __init__(self, capacity_bytes: int) -> None:
        self._table = ItemTable(capacity_bytes)
        self._lock = Lock()

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        with self._lock:
            return self._table.is_cached(mm_hash, needs_layout=needs_layout)

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        with self._lock:
            handle, _ = self._table.acquire(mm_hash, item, needs_layout=needs_layout)
            return handle

    def touch(self, mm_hash: str) -> None:
        with self._lock:
            self._table.touch(mm_hash)

    def release(self, handles: Iterable[ItemHandle]) -> None:
        with self._lock:
            self._table.release(handles)

    def clear_cache(self) -> None:
        with self._lock:
            for entry in tuple(self._table):
                self._table.remove(entry)

    def statistics(self) -> CacheStatistics:
        with self._lock:
            return self._table.statistics()
