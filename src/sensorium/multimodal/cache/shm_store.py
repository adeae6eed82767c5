"""Processed items in memory that processes share: written once, and read in place by all.

Any number of processes put and read, with an instance each (`create` in one, `attach` in the
others). Any of them may be killed at any moment: the others go on, and what it held comes back.

Invariants:
  1. Bytes of an item don't change between its `commit` and its last lease.
  2. One item at most can be found under a hash.
  3. An instance may use a reference as long as it has a lease on it: from `put`, `acquire` or
     `lease`, until as many calls of `release`.
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
    """A handle that has a lease on its item in the store."""

    reference: ShmReference


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    modality: str
    mm_hash: str
    layout: ItemLayout | None
    header: bytes  # of item_codec


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Metadata)


class ShmStore:
    """A store of processed items that several threads may use.

    After a fork the child has to `attach`.
    """

    def __init__(self, segment: ShmSegment) -> None:
        """Become a member of the segment, which is closed with the store, or if this fails."""
        self._segment = segment
        self._num_leases: Counter[ShmReference] = Counter()
        self._is_closed = False
        self._num_writers = 0
        self._writers = threading.Condition()
        with segment:
            try:
                self._index = ShmIndex(segment.buffer)
                self._data = segment.buffer[get_table_bytes(self._index.num_slots) :]
                self._member = segment.join(MAX_MEMBERS)
                self._index.discharge(self._member)  # a dead one may have had the number
                self._sweep()
            except BaseException:
                segment.close()
                raise

    @classmethod
    def create(cls, *, capacity_bytes: int, max_object_bytes: int) -> ShmStore:
        """Return a store in new memory. Raise `ModelError` if the system has too little."""
        return cls(create_memory(capacity_bytes=capacity_bytes, max_object_bytes=max_object_bytes))

    @classmethod
    def attach(cls, fd: int) -> ShmStore:
        """Return the store behind a descriptor inherited from another process (`pass_fds`)."""
        return cls(ShmSegment.attach(fd))

    @property
    def fd(self) -> int:
        """Return the descriptor for `pass_fds` and `attach`."""
        return self._segment.fd

    def put(self, item: ProcessedItem) -> ShmReference | None:
        """Store an item and lease it. Return `None` if there is no room for it.

        If an item is there already under its hash, that is leased instead, unless it lacks the
        layout that `item` has.
        """
        return self.put_or_find(item)[0]

    def put_or_find(self, item: ProcessedItem) -> tuple[ShmReference | None, bool]:
        """Do what `put` does, and return also whether the item was found."""
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
        """Lease the item of this hash. Return `None` if there is none.

        With `is_use` it becomes the most recently used. With `needs_layout` an item without a
        layout does not count.
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
        """Lease a reference once more, also one of another process.

        Return `None` if the item is gone.
        """
        with self._segment:
            if not self._index.is_current(reference):
                return None
            self._add_lease(reference.slot)
        return self._read_item(reference)

    def open(self, reference: ShmReference) -> MultiModalKwargsItem:
        """Return the tensors in place, without a copy. They must not be changed.

        They are valid as long as the caller's lease.
        """
        metadata, block = self._read(reference)
        return decode_block(metadata.header, block)

    def release(self, reference: ShmReference) -> None:
        """Give one lease back."""
        with self._segment:
            if not self._num_leases[reference]:
                raise InvariantError(f"{reference} is released more often than leased")
            self._num_leases[reference] -= 1
            if not self._num_leases[reference]:
                del self._num_leases[reference]
                self._index.remove_lease(reference.slot, self._member)

    def is_cached(self, mm_hash: str, *, needs_layout: bool = False) -> bool:
        """Return True if `acquire` would find the item."""
        with self._segment:
            return self._index.find(_make_key(mm_hash), needs_layout=needs_layout) is not None

    def touch(self, mm_hash: str) -> None:
        """Make the item of this hash the most recently used, if there is one."""
        with self._segment:
            slot = self._index.find(_make_key(mm_hash))
            if slot is not None:
                self._index.touch(slot)

    def copy_item(self, mm_hash: str) -> MultiModalKwargsItem | None:
        """Return a copy of the tensors of this hash, and make the item the most recently used.

        Return `None` if there is no such item. Bytes are copied inside the mutex, which spares the
        lease, so this is for small items.
        """
        with self._segment:
            slot = self._index.find(_make_key(mm_hash))
            if slot is None:
                return None
            self._index.touch(slot)
            block, metadata = (bytearray(view) for view in self._get_views(slot))
        return decode_block(_decoder.decode(metadata).header, memoryview(block))

    def clear_cache(self) -> None:
        """Hide all items. What is leased stays valid until its release."""
        with self._segment:
            self._index.clear()

    def statistics(self) -> CacheStatistics:
        """Return the counts of all processes together, without queries and hits."""
        with self._segment:
            return self._index.statistics()

    def close(self) -> None:
        """Give back all leases, after waiting for threads that are inside `put`.

        Tensors that are still around keep the memory mapped, but it may change under them.
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
        """Count a writer. Bytes are copied outside the mutex, but never after `close`."""
        with self._writers:
            if self._is_closed:
                raise InvariantError("the shared-memory store is closed")
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
        """Return a lease on what is there already, or on room for the item.

        The second value is True if it is room.
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
        """Let the item be found, unless another writer was faster.

        Return the lease that is valid.
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
        """Give back a slot that was reserved and not committed. Inside the mutex."""
        del self._num_leases[reference]
        self._index.free(reference.slot)

    # Leases. Inside the mutex.

    def _add_lease(self, slot: int) -> ShmReference:
        reference = self._index.get_reference(slot)
        if not self._num_leases[reference]:
            self._index.add_lease(slot, self._member)
        self._num_leases[reference] += 1
        return reference

    def _sweep(self) -> None:
        """Take back what dead processes held."""
        for member in list(self._index.get_members()):
            if member != self._member and not self._segment.is_member(member):
                self._index.discharge(member)
        self._index.free_orphans()

    # Reading: outside the mutex, under a lease.

    def _read(self, reference: ShmReference) -> tuple[_Metadata, memoryview]:
        """Return the metadata of a leased item, and the block of its tensors."""
        if not self._num_leases[reference]:
            raise InvariantError(f"{reference} is not leased here")
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
        """Return the memory of a slot: the block of the tensors, and the metadata."""
        start, middle, end = self._index.get_extent(slot)
        return self._data[start:middle], self._data[middle:end]


def _make_key(mm_hash: str) -> Key:
    """Return the digest that the hash is, or a digest of any other string."""
    if _DIGEST.fullmatch(mm_hash):
        return bytes.fromhex(mm_hash)
    return hashlib.sha256(b"sensorium.shm.key:" + mm_hash.encode()).digest()
