"""The memory of a shared-memory store: a segment with a mutex, and a table of its content.

This module does not import torch, so that a parent without torch can create the memory for the
processes that attach to it. The memory is an anonymous file (`memfd_create`). It has no name, so
nothing is left behind: the system frees it with the last process that holds it. Other processes
inherit its descriptor.

The table owns the slots and the order of use, and never touches the bytes of an item. Its methods
run inside the mutex, and a SIGKILL may cut any of them off after any of its writes to memory.

Invariants of the segment:
  1. Every byte is reserved before its first use, and the size is sealed: no access can end in a
     SIGBUS. The table is reserved at the start, and the room for items as it is needed.
  2. A process that dies in any way gives up the mutex and its membership in that moment, after the
     last of its threads has stopped writing. Both are locks of an open file.
  3. Locks belong to a file description that is never handed to another process. It must not be
     forked either: a child that lives on without `exec` would keep its parent's locks.

Invariants of the table, at every instruction:
  1. A slot changes its owner by one aligned write: of its state, or of one word of its leases. Its
     other fields are written only while it is FREE, because nothing reads them then.
  2. Slots that are not FREE don't overlap. The free space between them is not recorded.
  3. A lease of a process keeps the item in its slot. The slot is freed only by the last process
     that has a lease on it, or after the death of that process.
  4. WRITING and RETIRED slots without a lease have no owner; `free_orphans` frees them.
  5. Items lie in the reserved part of the data region, which starts at its beginning and only
     grows. Where the system lacks memory for that, the table evicts items as if it were full.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from sensorium.multimodal.cache.interface import CacheStatistics
from sensorium.types.errors import CapacityError, InvariantError, ModelError
from sensorium.types.multimodal import ShmReference
from sensorium.utils.system_memory import get_free_system_bytes

logger = logging.getLogger(__name__)

# The bytes that must stay available to other processes when memory for items is reserved.
_LEFT_BYTES = 256 * 2**20
# struct flock of 64-bit Linux: type, whence, start, length, pid, padding.
_FLOCK = struct.Struct("@hhqqi0q")


class ShmSegment:
    """A block of shared memory with a mutex, as one process has mapped it.

    `with segment:` holds the mutex, which excludes other processes, other threads and other
    instances in this process. A child process that inherits `fd` (by `pass_fds`) attaches to it.
    """

    def __init__(self, fd: int) -> None:
        """Map the memory behind the file descriptor `fd`, which `close` closes."""
        self.fd = fd
        # A description of its own: locks belong to the description, not to the process.
        self._lock_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._thread_lock = threading.Lock()
        self._is_closed = False
        self._has_warned = False
        # Without MAP_POPULATE, which would give pages to what is not reserved.
        self.buffer = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED))

    @classmethod
    def create(cls, num_bytes: int, *, reserved_bytes: int) -> ShmSegment:
        """Return new shared memory of `num_bytes` zeros.

        Only the first `reserved_bytes` may be used at once. Other bytes may be used after `reserve`
        has returned True for them. Raise `ModelError` if the system is not Linux, or has too little
        memory.
        """
        if sys.platform != "linux":
            raise ModelError(
                "the shared-memory cache needs Linux: give mm_processor_cache_type=lru"
            )
        fd = os.memfd_create("sensorium", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            os.posix_fallocate(fd, 0, reserved_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd)
        except OSError as error:
            os.close(fd)
            raise ModelError(
                f"the shared-memory cache can't reserve {reserved_bytes} bytes: {error.strerror}"
                "; give a smaller mm_processor_cache_gb"
            ) from error

    @classmethod
    def attach(cls, fd: int) -> ShmSegment:
        """Map the memory behind an inherited descriptor, which the caller still has to close."""
        return cls(os.dup(fd))

    def reserve(self, start: int, end: int) -> bool:
        """Reserve the bytes `[start, end)`; return whether the system had memory for them."""
        # The free memory is checked first: a reservation beyond a control group's limit would not
        # fail, but have the kernel kill a process.
        free_bytes = get_free_system_bytes()
        if end - start + _LEFT_BYTES <= free_bytes:
            try:
                os.posix_fallocate(self.fd, start, end - start)
            except OSError:
                pass
            else:
                return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the cache of processed media stays at %d MiB for now, because the system has only "
                "%d MiB available",
                start // 2**20,
                free_bytes // 2**20,
            )
        return False

    def __enter__(self) -> None:
        self._thread_lock.acquire()
        try:
            if self._is_closed:
                raise InvariantError("the shared memory of the media cache is closed")
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        except BaseException:
            self._thread_lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        if not self._is_closed:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        self._thread_lock.release()

    def join(self, max_members: int) -> int:
        """Return a member number for this instance, while the caller holds the mutex.

        It is below `max_members`, and no other living instance in any process has it. Raise
        `CapacityError` if all numbers are taken.
        """
        for member in range(max_members):
            try:
                fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, _describe(fcntl.F_WRLCK, member))
            except BlockingIOError:
                continue
            return member
        raise CapacityError(
            f"the shared-memory media cache has {max_members} processes already, and takes no more"
        )

    def is_member(self, member: int) -> bool:
        """Return True if another instance, in any living process, has this member number."""
        found = fcntl.fcntl(self._lock_fd, fcntl.F_OFD_GETLK, _describe(fcntl.F_WRLCK, member))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the descriptors and give up the member number; call this inside the mutex.

        Views of `buffer` stay usable.
        """
        self._is_closed = True
        os.close(self._lock_fd)
        os.close(self.fd)


def _describe(kind: int, member: int) -> bytes:
    """Return the `struct flock` of a lock on the byte that stands for a member number."""
    return _FLOCK.pack(kind, os.SEEK_SET, member, 1, 0)


MAX_MEMBERS = 256
ALIGNMENT = 64  # of an item in the data region, in bytes
HEADER_BYTES = 4096
EXTENT_BYTES = 64 * 2**20  # reserved at a time, which takes some hundredths of a second
_MAGIC = 0x53454E53_53484D31
_WORD_BITS = 64
_KEY_WORDS = 4
_LEASE_WORDS = MAX_MEMBERS // _WORD_BITS
_BYTES_PER_SLOT = 8 * (8 + _KEY_WORDS + _LEASE_WORDS)

Words = NDArray[np.uint64]
Key = bytes  # of 32 bytes


class SlotState:
    """The states of a slot, which is the row of the table for one item.

    They are numpy integers and not an enum, because comparing a column of the table with values of
    other types takes many times as long.
    """

    FREE = np.uint64(0)
    WRITING = np.uint64(1)  # its only leaseholder copies the bytes
    READY = np.uint64(2)
    RETIRED = np.uint64(3)  # can't be found any more; freed with its last lease


class _Field(IntEnum):
    """The positions of values in the table's header, counted in words of 64 bits."""

    MAGIC = 0
    NUM_SLOTS = 1
    CAPACITY = 2
    MAX_OBJECT = 3
    CLOCK = 4
    NUM_EVICTIONS = 5
    NUM_OVERSIZE = 6
    RESERVED = 7


def get_table_bytes(num_slots: int) -> int:
    """Return the size in bytes of the header and the slots, which lie before the items' data."""
    return HEADER_BYTES + -(-num_slots * _BYTES_PER_SLOT // HEADER_BYTES) * HEADER_BYTES


class ShmIndex:
    """The table of the items in shared memory, with one slot (row) for each item.

    A member is a process that has joined the segment. Its lease on a slot keeps the item from being
    evicted. Methods are called inside the segment's mutex, except `get_extent` under a lease.
    """

    def __init__(
        self, buffer: memoryview, *, reserve: Callable[[int, int], bool] = lambda *_: False
    ) -> None:
        """Find the table at the start of the memory; `reserve` is `ShmSegment.reserve` of it."""
        self._reserve_bytes = reserve
        header = np.frombuffer(buffer, np.uint64, HEADER_BYTES // 8)
        if header[_Field.MAGIC] != _MAGIC:
            raise InvariantError("the inherited file descriptor is not a shared-memory media cache")
        self._header: Words = header
        self.num_slots = int(header[_Field.NUM_SLOTS])
        self.capacity_bytes = int(header[_Field.CAPACITY])
        self.max_object_bytes = int(header[_Field.MAX_OBJECT])
        num_words = self.num_slots * _BYTES_PER_SLOT // 8
        # A row for each field: scans read consecutive words.
        table = np.frombuffer(buffer, np.uint64, num_words, HEADER_BYTES).reshape(
            -1, self.num_slots
        )
        self._states, self._generations, self._last_used, self._has_layout = table[0:4]
        self._offsets, self._rooms, self._block_bytes, self._metadata_bytes = table[4:8]
        self._keys: Words = table[8 : 8 + _KEY_WORDS]
        self._leases: Words = table[8 + _KEY_WORDS :]

    # Methods that read the table.

    def find(self, key: Key, *, needs_layout: bool = False) -> int | None:
        """Return the slot that has the item of this key, or None.

        With `needs_layout`, an item without a layout counts as absent. Only READY slots are found,
        and at most one of them has a given key.
        """
        words = np.frombuffer(key, np.uint64)
        for slot in (self._keys[0] == words[0]).nonzero()[0]:
            if self._states[slot] == SlotState.READY and (self._keys[:, slot] == words).all():
                return int(slot) if not needs_layout or self.has_layout(slot) else None
        return None

    def is_current(self, reference: ShmReference) -> bool:
        """Return True if the slot of a reference still has the item that it was made for."""
        slot = reference.slot
        return (
            0 <= slot < self.num_slots
            and self._generations[slot] == reference.generation
            and self._states[slot] in (SlotState.READY, SlotState.RETIRED)
        )

    def get_reference(self, slot: int) -> ShmReference:
        return ShmReference(slot=slot, generation=int(self._generations[slot]))

    def get_extent(self, slot: int) -> tuple[int, int, int]:
        """Return the offsets `(start, middle, end)` of an item's bytes in the data region.

        The block of its tensors is `[start, middle)`, and its metadata is `[middle, end)`.
        """
        start = int(self._offsets[slot])
        middle = start + int(self._block_bytes[slot])
        return start, middle, middle + int(self._metadata_bytes[slot])

    def has_layout(self, slot: int) -> bool:
        return bool(self._has_layout[slot])

    def get_members(self) -> Iterator[int]:
        """Yield every member, living or dead, that has a lease, also on a slot that is FREE."""
        for word, bits in enumerate(np.bitwise_or.reduce(self._leases, axis=1).tolist()):
            for bit in range(_WORD_BITS):
                if bits >> bit & 1:
                    yield word * _WORD_BITS + bit

    @property
    def reserved_bytes(self) -> int:
        """The bytes at the beginning of the data region that items may lie in."""
        return int(self._header[_Field.RESERVED])

    def statistics(self) -> CacheStatistics:
        """Return the counts of all processes, except queries and hits, which each process counts.

        These two are 0 here.
        """
        ready = self._states == SlotState.READY
        return CacheStatistics(
            num_evictions=int(self._header[_Field.NUM_EVICTIONS]),
            num_oversize=int(self._header[_Field.NUM_OVERSIZE]),
            num_items=int(ready.sum()),
            num_bytes=int(self._rooms[ready].sum()),
            capacity_bytes=self.capacity_bytes,
        )

    # Methods that change the table.

    def touch(self, slot: int) -> None:
        """Mark the item of a slot as the most recently used."""
        now = int(self._header[_Field.CLOCK]) + 1
        self._header[_Field.CLOCK] = now
        self._last_used[slot] = now

    def count_oversize(self) -> None:
        self._header[_Field.NUM_OVERSIZE] += np.uint64(1)

    def reserve(
        self, key: Key, *, block_bytes: int, metadata_bytes: int, has_layout: bool, member: int
    ) -> int | None:
        """Reserve a slot and memory for a new item, and return the slot.

        The slot is WRITING, with a lease of `member`. Items without a lease are evicted as needed,
        the least recently used first. Return None if that does not make enough room.
        """
        room = -(-(block_bytes + metadata_bytes) // ALIGNMENT) * ALIGNMENT
        plan = self._plan(room)
        # An item is evicted only where no memory is left to be reserved.
        if (plan is None or plan[1]) and self._grow(room):
            plan = self._plan(room)
        if plan is None:
            return None
        offset, victims = plan
        for victim in victims:
            self._states[victim] = SlotState.FREE
            self._header[_Field.NUM_EVICTIONS] += np.uint64(1)
        slot = int(np.argmin(self._states))  # FREE is the smallest
        self._keys[:, slot] = np.frombuffer(key, np.uint64)
        self._offsets[slot] = offset
        self._rooms[slot] = room
        self._block_bytes[slot] = block_bytes
        self._metadata_bytes[slot] = metadata_bytes
        self._has_layout[slot] = has_layout
        self._generations[slot] += np.uint64(1)
        self._leases[:, slot] = 0
        self.add_lease(slot, member)
        self.touch(slot)
        self._states[slot] = SlotState.WRITING
        return slot

    def commit(self, slot: int) -> None:
        """Make a complete item available to `find`, unless the cache was cleared meanwhile."""
        if self._states[slot] == SlotState.WRITING:
            self._states[slot] = SlotState.READY

    def free(self, slot: int) -> None:
        """Mark a slot as FREE; it must have no lease, or was reserved and never committed."""
        self._states[slot] = SlotState.FREE

    def retire(self, slot: int) -> None:
        """Hide an item from `find`; free its slot now, or with its last lease if it has any."""
        is_leased = self._leases[:, slot].any()
        self._states[slot] = SlotState.RETIRED if is_leased else SlotState.FREE

    def clear(self) -> None:
        for slot in np.flatnonzero(self._states != SlotState.FREE):
            self.retire(int(slot))

    def add_lease(self, slot: int, member: int) -> None:
        word, bit = divmod(member, _WORD_BITS)
        self._leases[word, slot] |= np.uint64(1 << bit)

    def remove_lease(self, slot: int, member: int) -> None:
        word, bit = divmod(member, _WORD_BITS)
        self._leases[word, slot] &= ~np.uint64(1 << bit)
        if self._states[slot] == SlotState.RETIRED:
            self.retire(slot)

    def discharge(self, member: int) -> None:
        """Remove all leases of a member that has left or died."""
        word, bit = divmod(member, _WORD_BITS)
        for slot in np.flatnonzero(self._leases[word] >> np.uint64(bit) & np.uint64(1)):
            self.remove_lease(int(slot), member)

    def free_orphans(self) -> None:
        """Free WRITING and RETIRED slots without a lease, which no living process will free."""
        is_pending = (self._states == SlotState.WRITING) | (self._states == SlotState.RETIRED)
        for slot in np.flatnonzero(is_pending):
            if not self._leases[:, slot].any():
                self.free(int(slot))

    # Memory for new items.

    def _grow(self, room: int) -> bool:
        """Reserve memory until `room` bytes fit behind all items; return True if any was added."""
        before = self.reserved_bytes
        used = np.flatnonzero(self._states)  # FREE is 0
        end = int((self._offsets[used] + self._rooms[used]).max(initial=np.uint64(0)))
        table_bytes = get_table_bytes(self.num_slots)
        while self.reserved_bytes < min(end + room, self.capacity_bytes):
            start = self.reserved_bytes
            grown = min(start + EXTENT_BYTES, self.capacity_bytes)
            if not self._reserve_bytes(table_bytes + start, table_bytes + grown):
                break
            self._header[_Field.RESERVED] = grown
        return self.reserved_bytes > before

    def _plan(self, room: int) -> tuple[int, list[int]] | None:
        """Return an offset at which `room` bytes fit, and the slots to evict for that, or None.

        The search finds the smallest number of least recently used items without which there is a
        large enough gap. Of these items, those that lie in the gap are to be evicted, or one of
        them if there is a gap already and only a slot is lacking.
        """
        slots = np.flatnonzero(self._states)  # FREE is 0
        slots = slots[np.argsort(self._offsets[slots], kind="stable")]
        starts = self._offsets[slots].astype(np.int64)
        ends = starts + self._rooms[slots].astype(np.int64)
        evictable = self._get_evictable(slots)
        num_slots_lacking = int(len(slots) == self.num_slots)

        def find_gap(num_evicted: int) -> int | None:
            is_kept = np.ones(len(slots), dtype=bool)
            is_kept[evictable[:num_evicted]] = False
            return _find_gap(starts[is_kept], ends[is_kept], self.reserved_bytes, room)

        num_evicted = _find_smallest(
            lambda count: find_gap(count) is not None, num_slots_lacking, len(evictable)
        )
        offset = None if num_evicted is None else find_gap(num_evicted)
        if offset is None:
            return None
        oldest = evictable[:num_evicted]
        is_in_the_way = (starts[oldest] < offset + room) & (ends[oldest] > offset)
        victims = slots[oldest[is_in_the_way]].tolist()
        return offset, victims or slots[oldest[:num_slots_lacking]].tolist()

    def _get_evictable(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the positions in `slots` of READY items without a lease, oldest use first."""
        is_ready = self._states[slots] == SlotState.READY
        positions = np.flatnonzero(is_ready & ~self._leases[:, slots].any(axis=0))
        return positions[np.argsort(self._last_used[slots[positions]])]


def _find_smallest(is_enough: Callable[[int], bool], lower: int, upper: int) -> int | None:
    """Return the smallest number in `[lower, upper]` for which `is_enough` is True, or None.

    If `is_enough` is True for a number, it must be True for all larger ones. The search tries the
    first numbers one by one, because a small one is usually enough, and then doubles its steps.
    """
    step = 0
    while lower <= upper:
        probe = min(lower + max(step, 1) - 1, upper)
        if is_enough(probe):
            return bisect_left(range(probe), True, lo=lower, key=is_enough)
        lower = probe + 1
        step = 2 * step or 1
    return None


def _find_gap(
    starts: NDArray[np.int64], ends: NDArray[np.int64], capacity: int, room: int
) -> int | None:
    """Return the start of the first gap of `room` bytes between sorted extents, or None."""
    gaps = np.empty((2, len(starts) + 1), dtype=np.int64)  # their starts, and their ends
    gaps[0, 0], gaps[1, -1] = 0, capacity
    gaps[0, 1:], gaps[1, :-1] = ends, starts
    is_fit = gaps[1] - gaps[0] >= room
    first = int(is_fit.argmax())
    return int(gaps[0, first]) if is_fit[first] else None


# There is one slot for this many bytes of capacity, within these bounds. If items are smaller, the
# table is full before the memory is. More slots make every search slower.
_CAPACITY_PER_SLOT = 128 * 1024
_MIN_SLOTS = 64
_MAX_SLOTS = 8 * 1024


def create_memory(*, capacity_bytes: int, max_object_bytes: int) -> ShmSegment:
    """Return new shared memory with an empty table of items.

    `capacity_bytes` is for all items together, and is reserved as items come; `max_object_bytes` is
    the limit for one item. Raise `ModelError` if either is less than 1, or if the system lacks the
    memory for the table.
    """
    if capacity_bytes < 1 or max_object_bytes < 1:
        raise ModelError(
            "the sizes of the shared-memory cache and of its largest object must be >= 1 byte"
        )
    capacity_bytes = -(-capacity_bytes // HEADER_BYTES) * HEADER_BYTES
    num_slots = min(max(capacity_bytes // _CAPACITY_PER_SLOT, _MIN_SLOTS), _MAX_SLOTS)
    table_bytes = get_table_bytes(num_slots)
    segment = ShmSegment.create(table_bytes + capacity_bytes, reserved_bytes=table_bytes)
    write_header(
        segment,
        num_slots=num_slots,
        capacity_bytes=capacity_bytes,
        max_object_bytes=max_object_bytes,
    )
    return segment


def write_header(
    segment: ShmSegment, *, num_slots: int, capacity_bytes: int, max_object_bytes: int
) -> None:
    """Write the header of an empty table to the beginning of new shared memory."""
    header = np.frombuffer(segment.buffer, np.uint64, HEADER_BYTES // 8)
    header[_Field.NUM_SLOTS] = num_slots
    header[_Field.CAPACITY] = capacity_bytes
    header[_Field.MAX_OBJECT] = max_object_bytes
    header[_Field.MAGIC] = _MAGIC
