"""The two halves of the shared-memory cache: frontends find and put items, the core reads them.

Both are thin: what is kept, and for how long, is the store's business (`shm_store`). Any number of
senders and receivers may share a store, each with its own instance of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sensorium.multimodal.cache.interface import CacheStatistics, ItemHandle
from sensorium.multimodal.cache.shm_store import ShmEntry, ShmStore
from sensorium.multimodal.item_codec import get_num_bytes
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import MultiModalKwargsItem, ProcessedItem
from sensorium.types.transfer import MissingItems, Payload, ShmReference, Transfer

_MAX_MISSING = 4096


class ShmSender:
    """A `SenderCache`. Handles carry a reference; `kwargs` too, if the tensors must be sent: there
    was no room for them, or the core could not find them.
    """

    def __init__(self, store: ShmStore) -> None:
        self._store = store
        self._lock = threading.Lock()  # of everything below
        self._num_queries = 0
        self._num_hits = 0
        self._num_resends = 0
        # What the core could not find, until it is sent; the oldest are forgotten.
        self._missing: dict[str, None] = {}

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        with self._lock:
            if mm_hash in self._missing:
                return False
        entry = self._store.peek(mm_hash)
        if entry is None:
            return False
        self._store.release(entry.reference)
        return entry.layout is not None or not needs_layout

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
        """The handle of an item that another process has put: one query, no hit. `None`, and
        nothing is counted, if it is gone: that process has died, or released it too early.
        """
        entry = self._store.lease(reference)
        if entry is None:
            return None
        if entry.mm_hash != mm_hash:
            self._store.release(reference)
            raise InvariantError(f"{reference} is {entry.mm_hash}, not {mm_hash}")
        self._count(is_hit=False)
        with self._lock:
            self._missing.pop(mm_hash, None)
        return _make_entry_handle(entry)

    def touch(self, mm_hash: str) -> None:
        self._store.touch(mm_hash)

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
        """If only `item` has a layout: of the whole item, put in the place of the entry."""
        if entry.layout is not None or item is None or item.layout is None:
            return _make_entry_handle(entry)
        reference = self._store.put(item)
        if reference is None:
            return replace(_make_entry_handle(entry), layout=item.layout)
        self._store.release(entry.reference)
        return _make_item_handle(item, reference)

    def _count(self, *, is_hit: bool) -> None:
        with self._lock:
            self._num_queries += 1
            self._num_hits += is_hit


@dataclass(slots=True, kw_only=True)
class _Held:
    """An item that requests of the core use; leased under `reference`, if it was not sent."""

    kwargs: MultiModalKwargsItem
    reference: ShmReference | None
    num_requests: int = 0


class ShmReceiver:
    """A `ReceiverCache`. An item that a running request has is shared with others that name it.

    A hash that is named twice in one call of `receive` or `release` counts once.
    """

    def __init__(self, store: ShmStore) -> None:
        self._store = store
        self._held: dict[str, _Held] = {}
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
        """Requests keep what they have."""
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


def _get_payload(handle: ItemHandle) -> Payload:
    payload = handle.reference if handle.kwargs is None else handle.kwargs
    if payload is None:
        raise InvariantError(f"the handle of {handle.mm_hash} carries nothing")
    return payload


def _make_entry_handle(entry: ShmEntry) -> ItemHandle:
    return ItemHandle(
        modality=entry.modality,
        mm_hash=entry.mm_hash,
        layout=entry.layout,
        num_bytes=entry.num_bytes,
        is_hit=False,
        reference=entry.reference,
    )


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
