"""Access to the shared-memory cache: frontends find and store items, and the core reads them.

The store (`shm_store`) decides what is kept, and for how long. Any number of senders, readers and
receivers may share the memory, each with a store object of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock

from sensorium.multimodal.cache.interface import CacheStatistics, ItemHandle
from sensorium.multimodal.cache.item_table import ItemTable
from sensorium.multimodal.cache.shm_store import LeasedItem, ShmStore
from sensorium.multimodal.item_codec import get_num_bytes
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import (
    ENCODED,
    MissingItems,
    MultiModalKwargsItem,
    Payload,
    ProcessedItem,
    ShmReference,
    Transfer,
)
from sensorium.utils.lru import LruCache

_MAX_MISSING = 4096


class ShmSender:
    """A `SenderCache` of items that this or another process has put into shared memory.

    Its handles point to shared memory. A handle carries the tensors only if they must be sent in a
    message, because shared memory had no room for them, or the core did not find them there.
    """

    def __init__(self, store: ShmStore) -> None:
        self._store = store
        self._counts = CacheStatistics()  # of this process
        self._lock = Lock()  # of the counts
        # Hashes that the core could not find, until they are sent; the oldest are forgotten.
        self._missing: LruCache[str, bool] = LruCache(_MAX_MISSING)

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        is_missing = self._missing.get(mm_hash)
        return not is_missing and self._store.is_cached(mm_hash, needs_layout=needs_layout)

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        if self._missing.get(mm_hash):
            return None if item is None else self._resend(item)
        found = self._store.acquire(mm_hash, needs_layout=needs_layout)
        handle: ItemHandle | None = found
        is_hit = found is not None
        if item is not None and (found is None or found.layout is None):
            if found is not None:
                self._store.release(found.reference)
            handle, was_there = self._put(item)  # another thread may have put it since
            is_hit = is_hit or was_there
        if handle is None:
            return None
        self._count(is_hit=is_hit)
        return replace(handle, is_hit=is_hit)

    def adopt(self, mm_hash: str, reference: ShmReference) -> ItemHandle | None:
        """Return a handle for an item that another process has put into shared memory.

        That counts as a query and no hit. If the item was evicted meanwhile, return None and count
        nothing. Raise `InvariantError` if the reference leads to an item of another hash.
        """
        item = self._store.lease(reference)
        if item is None:
            return None
        if item.mm_hash != mm_hash:
            self._store.release(reference)
            raise InvariantError(f"{reference} is media item {item.mm_hash}, not {mm_hash}")
        self._count(is_hit=False)
        self._missing.remove(mm_hash)
        return item

    def release(self, handles: Iterable[ItemHandle]) -> None:
        for handle in handles:
            if handle.reference is not None:
                self._store.release(handle.reference)

    def clear_cache(self) -> None:
        self._store.clear_cache()

    def statistics(self) -> CacheStatistics:
        with self._lock:
            return replace(
                self._store.statistics(),
                num_queries=self._counts.num_queries,
                num_hits=self._counts.num_hits,
                num_resends=self._counts.num_resends,
            )

    def make_transfer(self, handles: Sequence[ItemHandle]) -> Transfer:
        return Transfer(payloads={handle.mm_hash: _get_payload(handle) for handle in handles})

    def handle_missing(self, missing: MissingItems) -> None:
        for mm_hash in missing.mm_hashes:
            self._missing.put(mm_hash, True)
        with self._lock:
            self._counts.num_resends += len(missing.mm_hashes)

    @contextmanager
    def reading(self, mm_hash: str) -> Iterator[MultiModalKwargsItem | None]:
        """Give the `with` block the tensors of an item, or None if shared memory does not have it.

        The item is not evicted during the block. This counts as no query.
        """
        item = self._store.acquire(mm_hash, is_use=False)
        if item is None:
            yield None
            return
        try:
            yield self._store.open(item.reference)
        finally:
            self._store.release(item.reference)

    def _resend(self, item: ProcessedItem) -> ItemHandle:
        self._count(is_hit=False)
        handle = _make_item_handle(item, self._store.put(item))
        self._missing.remove(item.mm_hash)
        return replace(handle, kwargs=item.kwargs)

    def _put(self, item: ProcessedItem) -> tuple[ItemHandle, bool]:
        """Put an item into shared memory; return a handle, and whether the item was there before.

        If there is no room, but shared memory has the item without a layout, the handle refers to
        the tensors there.
        """
        reference, was_there = self._store.put_or_find(item)
        if reference is None and (bare := self._store.acquire(item.mm_hash)) is not None:
            return replace(bare, layout=item.layout), False
        return _make_item_handle(item, reference), was_there

    def _count(self, *, is_hit: bool) -> None:
        with self._lock:
            self._counts.num_queries += 1
            self._counts.num_hits += is_hit


class SharedReadonlyCache(ItemTable):
    """A `ProcessorCache` for requests that don't run the model, such as rendering and tokenising.

    It reads items from shared memory, without a change to the order of eviction or the statistics
    there. Other items are kept in this process. Every handle carries the tensors.
    """

    def __init__(self, store: ShmStore, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._store = store

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        if super().is_cached(mm_hash, needs_layout=needs_layout):
            return True
        item = self._acquire(mm_hash, needs_layout=needs_layout)
        if item is not None:
            self.release([item])
        return item is not None

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        return (
            super().get_and_update_item(mm_hash, needs_layout=needs_layout)
            or self._read(mm_hash, needs_layout=needs_layout)
            or super().get_and_update_item(mm_hash, item, needs_layout=needs_layout)
        )

    def release(self, handles: Iterable[ItemHandle]) -> None:
        for handle in handles:
            if handle.reference is None:
                super().release([handle])
            else:
                self._store.release(handle.reference)

    def _read(self, mm_hash: str, *, needs_layout: bool) -> ItemHandle | None:
        item = self._acquire(mm_hash, needs_layout=needs_layout)
        if item is None:
            return None
        with self._lock:
            self._counts.num_queries += 1
            self._counts.num_hits += 1
        return replace(item, is_hit=True)

    def _acquire(self, mm_hash: str, *, needs_layout: bool) -> ItemHandle | None:
        """Return a handle with the tensors of an item in shared memory, or None if it has none.

        An item that was stored with its encoder output counts as absent: it lacks some of the
        item's own tensors, which a renderer has to send.
        """
        item = self._store.acquire(mm_hash, needs_layout=needs_layout, is_use=False)
        if item is None:
            return None
        kwargs = self._store.open(item.reference)
        if ENCODED in kwargs:
            self._store.release(item.reference)
            return None
        return replace(item, kwargs=kwargs)


@dataclass(slots=True, kw_only=True)
class _Held:
    kwargs: MultiModalKwargsItem
    reference: ShmReference | None  # the lease; None: the tensors came with a message
    num_requests: int = 0


class ShmReceiver:
    """A `ReceiverCache` that reads items from shared memory, without a copy.

    Running requests with the same item share its tensors. A hash that occurs twice in one call
    counts once.
    """

    def __init__(self, store: ShmStore) -> None:
        self._store = store
        self._held: dict[str, _Held] = {}  # by mm_hash
        self._counts = CacheStatistics()  # of this process

    def receive(
        self, mm_hashes: Sequence[str], transfer: Transfer
    ) -> dict[str, MultiModalKwargsItem] | MissingItems:
        found: dict[str, _Held] = {}
        missing = []
        for mm_hash in dict.fromkeys(mm_hashes):
            held = self._find(mm_hash, transfer.payloads.get(mm_hash))
            if held is None:
                missing.append(mm_hash)
            else:
                held.num_requests += 1
                self._held[mm_hash] = found[mm_hash] = held
        if missing:
            self.release(found)
            return MissingItems(mm_hashes=tuple(missing), epoch=0)
        self._counts.num_queries += len(found)
        self._counts.num_hits += sum(held.reference is not None for held in found.values())
        return {mm_hash: held.kwargs for mm_hash, held in found.items()}

    def release(self, mm_hashes: Iterable[str]) -> None:
        for mm_hash in dict.fromkeys(mm_hashes):
            held = self._held.get(mm_hash)
            if held is None:
                raise InvariantError(f"media item {mm_hash} is released more often than received")
            held.num_requests -= 1
            if not held.num_requests:
                del self._held[mm_hash]
                if held.reference is not None:
                    self._store.release(held.reference)

    def clear_cache(self) -> None:
        """Remove all items from shared memory, except those that running requests use."""
        self._store.clear_cache()

    def statistics(self) -> CacheStatistics:
        counts = self._counts
        return replace(
            self._store.statistics(), num_queries=counts.num_queries, num_hits=counts.num_hits
        )

    def _find(self, mm_hash: str, payload: Payload | None) -> _Held | None:
        held = self._held.get(mm_hash)
        if held is not None:
            return held
        if payload is not None and not isinstance(payload, ShmReference):
            return _Held(kwargs=payload, reference=None)
        item = None if payload is None else self._lease(mm_hash, payload)
        if item is None:
            # It may have been put again, elsewhere, while the message was on its way.
            item = self._store.acquire(mm_hash)
        if item is None:
            return None
        return _Held(kwargs=self._store.open(item.reference), reference=item.reference)

    def _lease(self, mm_hash: str, reference: ShmReference) -> LeasedItem | None:
        item = self._store.lease(reference)
        if item is not None and item.mm_hash != mm_hash:
            self._store.release(reference)
            return None
        return item


def _get_payload(handle: ItemHandle) -> Payload:
    payload = handle.reference if handle.kwargs is None else handle.kwargs
    if payload is None:
        raise InvariantError(f"media item {handle.mm_hash} has neither tensors nor a reference")
    return payload


def _make_item_handle(item: ProcessedItem, reference: ShmReference | None) -> ItemHandle:
    return ItemHandle(
        modality=item.modality,
        mm_hash=item.mm_hash,
        layout=item.layout,
        num_bytes=get_num_bytes(item.kwargs),
        kwargs=item.kwargs if reference is None else None,
        reference=reference,
    )
