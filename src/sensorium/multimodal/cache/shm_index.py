"""The table of a shared-memory store: what lies where, under which key, and who leases it.

Owns the slots and the order of use; never touches the bytes of an item. Every method runs inside
the mutex of the segment, and any of them may be cut off by a SIGKILL after any of its stores.

Invariants, at every instruction:
  1. A slot changes hands by one aligned store: of its state, or of one word of its leases. Its
     other fields are written while it is FREE, where nobody reads them.
  2. Slots that are not FREE don't overlap. Free space is what they leave; it is kept nowhere.
  3. A slot with a lease is never freed but by its last leaseholder, or after that one's death.
  4. WRITING and RETIRED slots without a lease belong to nobody; `free_orphans` frees them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from sensorium.types.errors import InvariantError

MAX_MEMBERS = 256
ALIGNMENT = 64  # of an item in the data region, in bytes
HEADER_BYTES = 4096
_MAGIC = 0x53454E53_53484D31
_WORD_BITS = 64
_KEY_WORDS = 4
_LEASE_WORDS = MAX_MEMBERS // _WORD_BITS
_BYTES_PER_SLOT = 8 * (8 + _KEY_WORDS + _LEASE_WORDS)

Words = NDArray[np.uint64]
Key = bytes  # of 32 bytes


class SlotState:
    """Words, not an enum: comparing a column with anything else costs many times as much."""

    FREE = np.uint64(0)
    WRITING = np.uint64(1)  # its only leaseholder copies the bytes
    READY = np.uint64(2)
    RETIRED = np.uint64(3)  # can't be found any more; freed with its last lease


class _Field(IntEnum):
    """Words of the header."""

    MAGIC = 0
    NUM_SLOTS = 1
    CAPACITY = 2
    MAX_OBJECT = 3
    CLOCK = 4
    NUM_EVICTIONS = 5
    NUM_OVERSIZE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """An item's bytes in the data region: the block of its tensors, then its metadata."""

    offset: int
    block_bytes: int
    metadata_bytes: int


def get_table_bytes(num_slots: int) -> int:
    """Header and slots: what lies before the data region."""
    return HEADER_BYTES + -(-num_slots * _BYTES_PER_SLOT // HEADER_BYTES) * HEADER_BYTES


class ShmIndex:
    def __init__(self, buffer: memoryview) -> None:
        header = np.frombuffer(buffer, np.uint64, HEADER_BYTES // 8)
        if header[_Field.MAGIC] != _MAGIC:
            raise InvariantError("the inherited descriptor is not a shared-memory store")
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

    @staticmethod
    def format(
        buffer: memoryview, *, num_slots: int, capacity_bytes: int, max_object_bytes: int
    ) -> None:
        """Make an empty index in memory of zeros that nobody else has yet."""
        header = np.frombuffer(buffer, np.uint64, HEADER_BYTES // 8)
        header[_Field.NUM_SLOTS] = num_slots
        header[_Field.CAPACITY] = capacity_bytes
        header[_Field.MAX_OBJECT] = max_object_bytes
        header[_Field.MAGIC] = _MAGIC

    # Questions.

    def find(self, key: Key) -> int | None:
        """The READY slot of a key. There is one at most."""
        words = np.frombuffer(key, np.uint64)
        for slot in (self._keys[0] == words[0]).nonzero()[0]:
            if self._states[slot] == SlotState.READY and (self._keys[:, slot] == words).all():
                return int(slot)
        return None

    def is_current(self, slot: int, generation: int) -> bool:
        """Whether what was put there in that generation is there still."""
        return (
            0 <= slot < self.num_slots
            and self._generations[slot] == generation
            and self._states[slot] in (SlotState.READY, SlotState.RETIRED)
        )

    def get_generation(self, slot: int) -> int:
        return int(self._generations[slot])

    def get_extent(self, slot: int) -> Extent:
        return Extent(
            offset=int(self._offsets[slot]),
            block_bytes=int(self._block_bytes[slot]),
            metadata_bytes=int(self._metadata_bytes[slot]),
        )

    def has_layout(self, slot: int) -> bool:
        return bool(self._has_layout[slot])

    def get_members(self) -> Iterator[int]:
        """Everyone who has a lease, or left one in a FREE slot."""
        for word, bits in enumerate(np.bitwise_or.reduce(self._leases, axis=1).tolist()):
            for bit in range(_WORD_BITS):
                if bits >> bit & 1:
                    yield word * _WORD_BITS + bit

    def get_usage(self) -> tuple[int, int]:
        """How many items can be found, and the bytes they take."""
        ready = self._states == SlotState.READY
        return int(ready.sum()), int(self._rooms[ready].sum())

    def get_num_evictions(self) -> int:
        return int(self._header[_Field.NUM_EVICTIONS])

    def get_num_oversize(self) -> int:
        return int(self._header[_Field.NUM_OVERSIZE])

    # Changes.

    def touch(self, slot: int) -> None:
        """Make it the most recently used."""
        now = int(self._header[_Field.CLOCK]) + 1
        self._header[_Field.CLOCK] = now
        self._last_used[slot] = now

    def count_oversize(self) -> None:
        self._header[_Field.NUM_OVERSIZE] += np.uint64(1)

    def reserve(
        self, key: Key, *, block_bytes: int, metadata_bytes: int, has_layout: bool, member: int
    ) -> int | None:
        """A WRITING slot with room for an item, leased by `member`; unleased items are evicted for
        it, oldest first. `None` if all of that would not be enough.
        """
        room = -(-(block_bytes + metadata_bytes) // ALIGNMENT) * ALIGNMENT
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
        """Its bytes are complete. If the cache was cleared meanwhile it stays RETIRED."""
        if self._states[slot] == SlotState.WRITING:
            self._states[slot] = SlotState.READY

    def free(self, slot: int) -> None:
        """Take back what was reserved; or what has no lease."""
        self._states[slot] = SlotState.FREE

    def retire(self, slot: int) -> None:
        """It can't be found any more, and goes with its last lease."""
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
        """Remove all leases of someone who left or died."""
        word, bit = divmod(member, _WORD_BITS)
        for slot in np.flatnonzero(self._leases[word] >> np.uint64(bit) & np.uint64(1)):
            self.remove_lease(int(slot), member)

    def free_orphans(self) -> None:
        """Free what nobody will finish or free."""
        is_pending = (self._states == SlotState.WRITING) | (self._states == SlotState.RETIRED)
        for slot in np.flatnonzero(is_pending):
            if not self._leases[:, slot].any():
                self.free(int(slot))

    # Room.

    def _plan(self, room: int) -> tuple[int, list[int]] | None:
        """Where `room` bytes fit, and the slots to evict for that.

        The fewest oldest unleased items are found whose absence would leave a large enough gap; of
        these only those that lie in the way have to go.
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
            return _find_gap(starts[is_kept], ends[is_kept], self.capacity_bytes, room)

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
        """Positions in `slots` of what may be evicted, the oldest first."""
        is_ready = self._states[slots] == SlotState.READY
        positions = np.flatnonzero(is_ready & ~self._leases[:, slots].any(axis=0))
        return positions[np.argsort(self._last_used[slots[positions]])]


def _find_smallest(is_enough: Callable[[int], bool], lower: int, upper: int) -> int | None:
    """The smallest number in `[lower, upper]` that is enough. Mostly it is `lower` or the next, so
    the steps double only then.
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
    """The first place of `room` free bytes between the extents `[start, end)`, which are sorted."""
    gaps = np.empty((2, len(starts) + 1), dtype=np.int64)  # their starts, and their ends
    gaps[0, 0], gaps[1, -1] = 0, capacity
    gaps[0, 1:], gaps[1, :-1] = ends, starts
    is_fit = gaps[1] - gaps[0] >= room
    first = int(is_fit.argmax())
    return int(gaps[0, first]) if is_fit[first] else None
