"""Processed items in memory that processes share: written once, and read in place by all.

Any number of processes store and read items, each with a `ShmStore` of its own (`create` in one
process, `attach` in the others). Any process may be killed at any moment: the others continue, and
reclaim what it held.

A lease is a hold that keeps an item from being evicted. `put`, `acquire` and `lease` take one, and
`release` gives up one.

Invariants:
  1. Bytes of an item don't change between its `commit` and the end of its last lease.
  2. One item at most can be found under a hash.
  3. A `ShmStore` may use a reference as long as it has a lease on it.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from sensorium.multimodal.cache.interface import CacheStatistics, ItemHandle
from sensorium.multimodal.cache.shm_memory import (
    MAX_MEMBERS,
    Key,
    ShmIndex,
    ShmSegment,
    create_memory,
    get_table_bytes,
)
from sensorium.multimodal.item_codec import decode_block, encode_header, get_num_bytes, write_block
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem, ProcessedItem, ShmReference

_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeasedItem(ItemHandle):
    """A handle with a lease, which keeps an item in shared memory until it is released."""

    reference: ShmReference


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    modality: str
    mm_hash: str
    layout: ItemLayout | None
    header: bytes  # of item_codec


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Metadata)


class ShmStore:
    """A thread-safe store of items in shared memory; a forked child must `attach` a new one."""

    def __init__(self, segment: ShmSegment) -> None:
        """Join a segment, and own it: `close` closes it, and so does a failure of this call."""
        self._segment = segment
        self._num_leases: Counter[ShmReference] = Counter()
        self._is_closed = False
        self._num_writers = 0
        self._writers = threading.Condition()
        with segment:
            try:
                self._index = ShmIndex(segment.buffer, reserve=segment.reserve)
                self._data = segment.buffer[get_table_bytes(self._index.num_slots) :]
                self._member = segment.join(MAX_MEMBERS)
                self._index.discharge(self._member)  # a dead process may have had the number
                self._sweep()
            except BaseException:
                segment.close()
                raise

    @classmethod
    def create(cls, *, capacity_bytes: int, max_object_bytes: int) -> ShmStore:
        """Return a store in new shared memory (see `create_memory`)."""
        return cls(create_memory(capacity_bytes=capacity_bytes, max_object_bytes=max_object_bytes))

    @classmethod
    def attach(cls, fd: int) -> ShmStore:
        """Return the store behind a file descriptor that was inherited by `pass_fds`."""
        return cls(ShmSegment.attach(fd))

    @property
    def fd(self) -> int:
        return self._segment.fd

    def put(self, item: ProcessedItem) -> ShmReference | None:
        """Store an item, and return a leased reference to it, or None if there is no room.

        If the store already has an item with this hash, that item is leased and `item` is not
        stored, unless the stored item lacks a layout and `item` has one.
        """
        return self.put_or_find(item)[0]

    def put_or_find(self, item: ProcessedItem) -> tuple[ShmReference | None, bool]:
        """Do what `put` does, and return also True if the store had the item already."""
        key = _make_key(item.mm_hash)
        metadata = _encoder.encode(
            _Metadata(item.modality, item.mm_hash, item.layout, encode_header(item.kwargs))
        )
        with self._writing():
            reference, is_new = self._reserve(key, item, metadata)
            if not is_new or reference is None:
                return reference, reference is not None
            try:
                self._write(reference.slot, item, metadata)
            except BaseException:
                with self._segment:
                    self._abandon(reference)
                raise
            committed = self._commit(key, reference)
            return committed, committed != reference

    def acquire(
        self, mm_hash: str, *, needs_layout: bool = False, is_use: bool = True
    ) -> LeasedItem | None:
        """Look up an item by its hash, and return a handle with a lease on it, or None.

        With `is_use`, the item becomes the most recently used. With `needs_layout`, an item without
        a layout counts as absent.
        """
        with self._segment:
            slot = self._index.find(_make_key(mm_hash), needs_layout=needs_layout)
            if slot is None:
                return None
            if is_use:
                self._index.touch(slot)
            reference = self._add_lease(slot)
        return self._read_item(reference)

    def lease(self, reference: ShmReference) -> LeasedItem | None:
        """Lease an item by a reference of this or another process; return None if it is gone."""
        with self._segment:
            if not self._index.is_current(reference):
                return None
            self._add_lease(reference.slot)
        return self._read_item(reference)

    def open(self, reference: ShmReference) -> MultiModalKwargsItem:
        """Return the tensors of a leased item as views of the shared memory, without a copy.

        They must not be changed, and are valid until the lease is released.
        """
        metadata, block = self._read(reference)
        return decode_block(metadata.header, block)

    def release(self, reference: ShmReference) -> None:
        """Release one lease of this instance; an item without any lease may be evicted."""
        with self._segment:
            if not self._num_leases[reference]:
                raise InvariantError(f"media item {reference} is released more often than leased")
            self._num_leases[reference] -= 1
            if not self._num_leases[reference]:
                del self._num_leases[reference]
                self._index.remove_lease(reference.slot, self._member)

    def is_cached(self, mm_hash: str, *, needs_layout: bool = False) -> bool:
        """Return True if `acquire` would find the item."""
        with self._segment:
            return self._index.find(_make_key(mm_hash), needs_layout=needs_layout) is not None

    def touch(self, mm_hash: str) -> None:
        """Mark the item of this hash as the most recently used, if the store has it."""
        with self._segment:
            slot = self._index.find(_make_key(mm_hash))
            if slot is not None:
                self._index.touch(slot)

    def copy_item(self, mm_hash: str) -> MultiModalKwargsItem | None:
        """Return a copy of the tensors of an item, which becomes the most recently used, or None.

        The copy is made inside the mutex, without a lease, so this is only for small items.
        """
        with self._segment:
            slot = self._index.find(_make_key(mm_hash))
            if slot is None:
                return None
            self._index.touch(slot)
            block, metadata = (bytearray(view) for view in self._get_views(slot))
        return decode_block(_decoder.decode(metadata).header, memoryview(block))

    def clear_cache(self) -> None:
        """Remove all items from the store; leased ones stay valid until they are released."""
        with self._segment:
            self._index.clear()

    def statistics(self) -> CacheStatistics:
        with self._segment:
            return self._index.statistics()

    def close(self) -> None:
        """Give up all leases and close the shared memory, when all calls of `put` have ended.

        Tensors that are still in use keep the memory mapped, but other processes may overwrite it.
        Further calls do nothing.
        """
        with self._writers:
            if self._is_closed:
                return
            self._is_closed = True
            self._writers.wait_for(lambda: not self._num_writers)
        with self._segment:
            self._index.discharge(self._member)
            self._index.free_orphans()
            self._segment.close()

    # Writing: reserve and commit inside the mutex, the copy outside.

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Make `close` wait for the end of this context, which copies bytes without the mutex."""
        with self._writers:
            if self._is_closed:
                raise InvariantError("the shared-memory store of media items is closed")
            self._num_writers += 1
        try:
            yield
        finally:
            with self._writers:
                self._num_writers -= 1
                self._writers.notify_all()

    def _reserve(
        self, key: Key, item: ProcessedItem, metadata: bytes
    ) -> tuple[ShmReference | None, bool]:
        """Lease the item of this key, or memory for it if the store does not have it.

        The second value is True if the memory has to be written. The reference is None if there is
        no room.
        """
        block_bytes = get_num_bytes(item.kwargs)
        with self._segment:
            found = self._index.find(key, needs_layout=item.layout is not None)
            if found is not None:
                self._index.touch(found)
                return self._add_lease(found), False
            reserve = partial(
                self._index.reserve,
                key,
                block_bytes=block_bytes,
                metadata_bytes=len(metadata),
                has_layout=item.layout is not None,
                member=self._member,
            )
            slot = None
            if block_bytes <= self._index.max_object_bytes:
                slot = reserve()
                if slot is None:
                    self._sweep()
                    slot = reserve()
            if slot is None:
                self._index.count_oversize()
                return None, False
            return self._add_lease(slot), True

    def _write(self, slot: int, item: ProcessedItem, metadata: bytes) -> None:
        block, rest = self._get_views(slot)
        write_block(item.kwargs, block)
        rest[:] = metadata

    def _commit(self, key: Key, reference: ShmReference) -> ShmReference:
        """Make a written item available to `acquire`, unless another writer was faster.

        Return the reference that the caller has a lease on: `reference`, or the other writer's.
        """
        with self._segment:
            rival = self._index.find(key)
            if rival is not None:
                if self._index.has_layout(rival) or not self._index.has_layout(reference.slot):
                    self._abandon(reference)
                    return self._add_lease(rival)
                self._index.retire(rival)
            self._index.commit(reference.slot)
            return reference

    def _abandon(self, reference: ShmReference) -> None:
        """Free a slot that was reserved and never committed. The caller holds the mutex."""
        del self._num_leases[reference]
        self._index.free(reference.slot)

    # Leases: called inside the mutex.

    def _add_lease(self, slot: int) -> ShmReference:
        reference = self._index.get_reference(slot)
        if not self._num_leases[reference]:
            self._index.add_lease(slot, self._member)
        self._num_leases[reference] += 1
        return reference

    def _sweep(self) -> None:
        """Reclaim the slots and the memory of dead processes. The caller holds the mutex."""
        for member in list(self._index.get_members()):
            if member != self._member and not self._segment.is_member(member):
                self._index.discharge(member)
        self._index.free_orphans()

    # Reading: outside the mutex, under a lease.

    def _read(self, reference: ShmReference) -> tuple[_Metadata, memoryview]:
        if not self._num_leases[reference]:
            raise InvariantError(f"media item {reference} is read without a lease on it")
        block, metadata = self._get_views(reference.slot)
        return _decoder.decode(metadata), block

    def _read_item(self, reference: ShmReference) -> LeasedItem:
        metadata, block = self._read(reference)
        return LeasedItem(
            reference=reference,
            modality=metadata.modality,
            mm_hash=metadata.mm_hash,
            layout=metadata.layout,
            num_bytes=len(block),
        )

    def _get_views(self, slot: int) -> tuple[memoryview, memoryview]:
        start, middle, end = self._index.get_extent(slot)
        return self._data[start:middle], self._data[middle:end]


def _make_key(mm_hash: str) -> Key:
    """Return the key of 32 bytes for a hash: the bytes of its 64 hex digits, or its SHA-256."""
    if _DIGEST.fullmatch(mm_hash):
        return bytes.fromhex(mm_hash)
    return hashlib.sha256(b"sensorium.shm.key:" + mm_hash.encode()).digest()
