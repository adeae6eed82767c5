"""The sides of the shared-memory cache: frontends find and put items, the core reads them.

All are thin: what is kept, and for how long, is decided by the store (`shm_store`). Any number of
senders, readers and receivers may share a store, each with its own instance of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sensorium.multimodal.cache.interface import CacheStatistics, ItemHandle
from sensorium.multimodal.cache.item_table import ItemTable
from sensorium.multimodal.cache.shm_store import ShmEntry, ShmStore
from sensorium.multimodal.item_codec import get_num_bytes
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import (
    MissingItems,
    MultiModalKwargsItem,
    Payload,
    ProcessedItem,
    ShmReference,
    Transfer,
)

_MAX_MISSING = 4096


class ShmSender:
    """A `SharedCache` for the requests that a core runs.

    Handles carry a reference. They carry the tensors as well if these must be sent, because there
    was no room for them or the core could not find them.
    """

    def __init__(self, store: ShmStore) -> None:
        self._store = store
        self._lock = threading.Lock()  # of everything below
        self._num_queries = 0
        self._num_hits = 0
        self._num_resends = 0
        # Hashes that the core could not find, until they are sent; the oldest are forgotten.
        self._missing: dict[str, None] = {}

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        with self._lock:
            if mm_hash in self._missing:
                return False
        return _is_stored(self._store, mm_hash, needs_layout=needs_layout)

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        with self._lock:
            is_missing = mm_hash in self._missing
        if is_missing:
            return None if item is None else self._resend(item)
        entry = self._store.acquire(mm_hash)
        is_hit = entry is not None and (entry.layout is not None or not needs_layout)
        if item is None and not is_hit:
            if entry is not None:
                self._store.release(entry.reference)
            return None
        if entry is not None:
            self._count(is_hit=is_hit)
            return replace(self._add_layout(entry, item), is_hit=is_hit)
        if item is None:
            return None
        reference, is_found = self._store.put_or_find(item)  # another thread may have put it
        self._count(is_hit=is_found)
        return replace(_make_item_handle(item, reference), is_hit=is_found)

    def adopt(self, mm_hash: str, reference: ShmReference) -> ItemHandle | None:
        entry = self._store.lease(reference)
        if entry is None:
            return None
        if entry.mm_hash != mm_hash:
            self._store.release(reference)
            raise InvariantError(f"{reference} is {entry.mm_hash}, not {mm_hash}")
        self._count(is_hit=False)
        with self._lock:
            self._missing.pop(mm_hash, None)
        return entry.make_handle()

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
                num_queries=self._num_queries,
                num_hits=self._num_hits,
                num_resends=self._num_resends,
            )

    def make_transfer(self, handles: Sequence[ItemHandle]) -> Transfer:
        return Transfer(payloads={handle.mm_hash: _get_payload(handle) for handle in handles})

    def handle_missing(self, missing: MissingItems) -> None:
        with self._lock:
            self._missing |= dict.fromkeys(missing.mm_hashes)
            for mm_hash in list(self._missing)[:-_MAX_MISSING]:
                del self._missing[mm_hash]
            self._num_resends += len(missing.mm_hashes)

    def _resend(self, item: ProcessedItem) -> ItemHandle:
        self._count(is_hit=False)
        handle = _make_item_handle(item, self._store.put(item))
        with self._lock:
            self._missing.pop(item.mm_hash, None)
        return replace(handle, kwargs=item.kwargs)

    def _add_layout(self, entry: ShmEntry, item: ProcessedItem | None) -> ItemHandle:
        """Return a handle of the entry, or of the item in its place if only that has a layout."""
        if entry.layout is not None or item is None or item.layout is None:
            return entry.make_handle()
        reference = self._store.put(item)
        if reference is None:
            return replace(entry.make_handle(), layout=item.layout)
        self._store.release(entry.reference)
        return _make_item_handle(item, reference)

    def _count(self, *, is_hit: bool) -> None:
        with self._lock:
            self._num_queries += 1
            self._num_hits += is_hit


class SharedReadonlyCache(ItemTable):
    """A `ProcessorCache` for requests that run no engine.

    It reads what the main cache has in shared memory, without a change to its order or its counts.
    What it has to process itself it keeps in this process. All its handles have tensors.
    """

    def __init__(self, store: ShmStore, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._store = store
        self._num_shared_hits = 0

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        return super().is_cached(mm_hash, needs_layout=needs_layout) or _is_stored(
            self._store, mm_hash, needs_layout=needs_layout
        )

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        return (
            super().get_and_update_item(mm_hash, needs_layout=needs_layout)
            or self._peek(mm_hash, needs_layout=needs_layout)
            or super().get_and_update_item(mm_hash, item, needs_layout=needs_layout)
        )

    def release(self, handles: Iterable[ItemHandle]) -> None:
        for handle in handles:
            if handle.reference is None:
                super().release([handle])
            else:
                self._store.release(handle.reference)

    def statistics(self) -> CacheStatistics:
        own = super().statistics()
        with self._lock:
            shared = self._num_shared_hits
        return replace(own, num_queries=own.num_queries + shared, num_hits=own.num_hits + shared)

    def _peek(self, mm_hash: str, *, needs_layout: bool) -> ItemHandle | None:
        entry = self._store.peek(mm_hash)
        if entry is None:
            return None
        if entry.layout is None and needs_layout:
            self._store.release(entry.reference)
            return None
        with self._lock:
            self._num_shared_hits += 1
        kwargs = self._store.open(entry.reference)
        return replace(entry.make_handle(), is_hit=True, kwargs=kwargs)


@dataclass(slots=True, kw_only=True)
class _Held:
    """An item that requests of the core use."""

    kwargs: MultiModalKwargsItem
    reference: ShmReference | None  # the lease; None: the tensors came with a message
    num_requests: int = 0


class ShmReceiver:
    """A `ReceiverCache` in which an item of a running request is shared with others that name it.

    A hash that is named twice in one call of `receive` or `release` counts once.
    """

    def __init__(self, store: ShmStore) -> None:
        self._store = store
        self._held: dict[str, _Held] = {}  # by mm_hash
        self._num_queries = 0
        self._num_hits = 0

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
        self._num_queries += len(found)
        self._num_hits += sum(held.reference is not None for held in found.values())
        return {mm_hash: held.kwargs for mm_hash, held in found.items()}

    def release(self, mm_hashes: Iterable[str]) -> None:
        for mm_hash in dict.fromkeys(mm_hashes):
            held = self._held.get(mm_hash)
            if held is None:
                raise InvariantError(f"{mm_hash} is released more often than received")
            held.num_requests -= 1
            if not held.num_requests:
                del self._held[mm_hash]
                if held.reference is not None:
                    self._store.release(held.reference)

    def clear_cache(self) -> None:
        """Forget everything but what running requests use."""
        self._store.clear_cache()

    def statistics(self) -> CacheStatistics:
        return replace(
            self._store.statistics(), num_queries=self._num_queries, num_hits=self._num_hits
        )

    def _find(self, mm_hash: str, payload: Payload | None) -> _Held | None:
        held = self._held.get(mm_hash)
        if held is not None:
            return held
        if payload is not None and not isinstance(payload, ShmReference):
            return _Held(kwargs=payload, reference=None)
        entry = None if payload is None else self._lease(mm_hash, payload)
        if entry is None:
            # It may have been put again, elsewhere, while the message was on its way.
            entry = self._store.acquire(mm_hash)
        if entry is None:
            return None
        return _Held(kwargs=self._store.open(entry.reference), reference=entry.reference)

    def _lease(self, mm_hash: str, reference: ShmReference) -> ShmEntry | None:
        entry = self._store.lease(reference)
        if entry is not None and entry.mm_hash != mm_hash:
            self._store.release(reference)
            return None
        return entry


def _is_stored(store: ShmStore, mm_hash: str, *, needs_layout: bool) -> bool:
    entry = store.peek(mm_hash)
    if entry is None:
        return False
    store.release(entry.reference)
    return entry.layout is not None or not needs_layout


def _get_payload(handle: ItemHandle) -> Payload:
    payload = handle.reference if handle.kwargs is None else handle.kwargs
    if payload is None:
        raise InvariantError(f"the handle of {handle.mm_hash} carries nothing")
    return payload


def _make_item_handle(item: ProcessedItem, reference: ShmReference | None) -> ItemHandle:
    return ItemHandle(
        modality=item.modality,
        mm_hash=item.mm_hash,
        layout=item.layout,
        num_bytes=get_num_bytes(item.kwargs),
        is_hit=False,
        kwargs=item.kwargs if reference is None else None,
        reference=reference,
    )
