"""Processed items in memory that processes share: written once, and read in place by all.

Any number of processes put and read, with an instance each (`create` in one, `attach` in the
others). Any of them may be killed at any moment: the others go on, and what it held comes back.

Invariants:
  1. Bytes of an item don't change between its `commit` and its last lease.
  2. One item at most can be found under a hash.
  3. An instance may use a reference as long as it has a lease on it: from `put`, `acquire`, `peek`
     or `lease`, until as many calls of `release`.
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
from types import TracebackType

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
from sensorium.multimodal.item_codec import (
    decode_block,
    encode_header,
    get_num_bytes,
    write_block,
)
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem, ProcessedItem, ShmReference

_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmEntry:
    """A lease on an item in the store, with all of the item but its tensors."""

    reference: ShmReference
    modality: str
    mm_hash: str
    layout: ItemLayout | None
    num_bytes: int  # of the tensors

    def make_handle(self) -> ItemHandle:
        """Return a handle that takes over this lease."""
        return ItemHandle(
            modality=self.modality,
            mm_hash=self.mm_hash,
            layout=self.layout,
            num_bytes=self.num_bytes,
            is_hit=False,
            reference=self.reference,
        )


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
        """Use `create` or `attach`. Inside the mutex of the segment."""
        self._segment = segment
        self._index = ShmIndex(segment.buffer)
        self._data = segment.buffer[get_table_bytes(self._index.num_slots) :]
        self._num_leases: Counter[ShmReference] = Counter()
        self._is_closed = False
        self._num_writers = 0
        self._writers = threading.Condition()
        self._member = segment.join(MAX_MEMBERS)
        self._index.discharge(self._member)  # a dead one may have had the number
        self._sweep()

    @classmethod
    def create(cls, *, capacity_bytes: int, max_object_bytes: int) -> ShmStore:
        """Return a store in new memory. Raise `ModelError` if the system has too little."""
        return cls._join(
            create_memory(capacity_bytes=capacity_bytes, max_object_bytes=max_object_bytes)
        )

    @classmethod
    def attach(cls, fd: int) -> ShmStore:
        """Return the store behind a descriptor inherited from another process (`pass_fds`)."""
        return cls._join(ShmSegment.attach(fd))

    @classmethod
    def _join(cls, segment: ShmSegment) -> ShmStore:
        with segment:
            try:
                return cls(segment)
            except BaseException:
                segment.close()
                raise

    @property
    def fd(self) -> int:
        """Return the descriptor for `pass_fds` and `attach`."""
        return self._segment.fd

    def put(self, item: ProcessedItem) -> ShmReference | None:
        """Store an item and lease it. `None`: there is no room for it.

        What is found under its hash is leased instead, unless only `item` has a layout.
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

    def acquire(self, mm_hash: str) -> ShmEntry | None:
        """Lease the item of this hash and make it the most recently used."""
        return self._acquire(mm_hash, is_use=True)

    def peek(self, mm_hash: str) -> ShmEntry | None:
        """Lease the item of this hash and leave the order as it is."""
        return self._acquire(mm_hash, is_use=False)

    def lease(self, reference: ShmReference) -> ShmEntry | None:
        """Lease a reference once more, also one of another process.

        Return `None` if the item is gone.
        """
        with self._segment:
            if not self._index.is_current(reference.slot, reference.generation):
                return None
            self._add_lease(reference)
        return self._read_entry(reference)

    def open(self, reference: ShmReference) -> MultiModalKwargsItem:
        """Return the tensors in place, without a copy. They must not be changed.

        They are valid as long as the caller's lease.
        """
        metadata = self._read_metadata(reference)
        extent = self._index.get_extent(reference.slot)
        block = self._data[extent.offset : extent.offset + extent.block_bytes]
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

    def is_cached(self, mm_hash: str) -> bool:
        with self._segment:
            return self._index.find(_make_key(mm_hash)) is not None

    def touch(self, mm_hash: str) -> None:
        with self._segment:
            slot = self._index.find(_make_key(mm_hash))
            if slot is not None:
                self._index.touch(slot)

    def clear_cache(self) -> None:
        """Hide all items. What is leased stays valid until its release."""
        with self._segment:
            self._index.clear()

    def sweep(self) -> None:
        """Take back what dead processes held. `put` does so itself when it needs room."""
        with self._segment:
            self._sweep()

    def statistics(self) -> CacheStatistics:
        """Return the counts of all processes together, without queries and hits."""
        with self._segment:
            num_items, num_bytes = self._index.get_usage()
            return CacheStatistics(
                num_evictions=self._index.get_num_evictions(),
                num_oversize=self._index.get_num_oversize(),
                num_items=num_items,
                num_bytes=num_bytes,
                capacity_bytes=self._index.capacity_bytes,
            )

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

    def __enter__(self) -> ShmStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

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
            found = self._find_equal(key, item)
            if found is not None:
                self._index.touch(found.slot)
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
            return self._add_lease(self._make_reference(slot)), True

    def _write(self, slot: int, item: ProcessedItem, metadata: bytes) -> None:
        extent = self._index.get_extent(slot)
        middle = extent.offset + extent.block_bytes
        write_block(item.kwargs, self._data[extent.offset : middle])
        self._data[middle : middle + extent.metadata_bytes] = metadata

    def _commit(self, key: Key, reference: ShmReference) -> ShmReference:
        """Let the item be found, unless another writer was faster.

        Return the lease that is valid.
        """
        with self._segment:
            rival = self._index.find(key)
            if rival is None:
                self._index.commit(reference.slot)
                return reference
            if self._index.has_layout(reference.slot) and not self._index.has_layout(rival):
                self._index.retire(rival)
                self._index.commit(reference.slot)
                return reference
            self._abandon(reference)
            return self._add_lease(self._make_reference(rival))

    def _abandon(self, reference: ShmReference) -> None:
        del self._num_leases[reference]
        self._index.free(reference.slot)

    # Leases. Inside the mutex.

    def _acquire(self, mm_hash: str, *, is_use: bool) -> ShmEntry | None:
        with self._segment:
            slot = self._index.find(_make_key(mm_hash))
            if slot is None:
                return None
            if is_use:
                self._index.touch(slot)
            reference = self._add_lease(self._make_reference(slot))
        return self._read_entry(reference)

    def _find_equal(self, key: Key, item: ProcessedItem) -> ShmReference | None:
        slot = self._index.find(key)
        if slot is None or (item.layout is not None and not self._index.has_layout(slot)):
            return None
        return self._make_reference(slot)

    def _make_reference(self, slot: int) -> ShmReference:
        return ShmReference(slot=slot, generation=self._index.get_generation(slot))

    def _add_lease(self, reference: ShmReference) -> ShmReference:
        if not self._num_leases[reference]:
            self._index.add_lease(reference.slot, self._member)
        self._num_leases[reference] += 1
        return reference

    def _sweep(self) -> None:
        for member in list(self._index.get_members()):
            if member != self._member and not self._segment.is_member(member):
                self._index.discharge(member)
        self._index.free_orphans()

    # Reading: outside the mutex, under a lease.

    def _read_metadata(self, reference: ShmReference) -> _Metadata:
        if not self._num_leases[reference]:
            raise InvariantError(f"{reference} is not leased here")
        extent = self._index.get_extent(reference.slot)
        start = extent.offset + extent.block_bytes
        return _decoder.decode(self._data[start : start + extent.metadata_bytes])

    def _read_entry(self, reference: ShmReference) -> ShmEntry:
        metadata = self._read_metadata(reference)
        return ShmEntry(
            reference=reference,
            modality=metadata.modality,
            mm_hash=metadata.mm_hash,
            layout=metadata.layout,
            num_bytes=self._index.get_extent(reference.slot).block_bytes,
        )


def _make_key(mm_hash: str) -> Key:
    """Return the digest that the hash is, or a digest of any other string."""
    if _DIGEST.fullmatch(mm_hash):
        return bytes.fromhex(mm_hash)
    return hashlib.sha256(b"sensorium.shm.key:" + mm_hash.encode()).digest()
