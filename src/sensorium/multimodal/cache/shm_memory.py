"""Makes the memory of a shared-memory store: reserved, with an empty table. Free of torch.

Whoever makes it need not use it: a parent may make it for processes that attach to it.
"""

from __future__ import annotations

from sensorium.multimodal.cache.shm_index import HEADER_BYTES, ShmIndex, get_table_bytes
from sensorium.multimodal.cache.shm_segment import ShmSegment
from sensorium.types.errors import ModelError

# A slot for each so many bytes of capacity, between these numbers of slots: smaller items fill the
# table before the memory, and every search reads the whole table.
_BYTES_PER_SLOT = 128 * 1024
_MIN_SLOTS = 64
_MAX_SLOTS = 8 * 1024


def create_memory(*, capacity_bytes: int, max_object_bytes: int) -> ShmSegment:
    """A `ModelError` if the system does not have it."""
    if capacity_bytes < 1 or max_object_bytes < 1:
        raise ModelError("the shared-memory cache and its largest object need >= 1 byte")
    capacity_bytes = -(-capacity_bytes // HEADER_BYTES) * HEADER_BYTES
    num_slots = min(max(capacity_bytes // _BYTES_PER_SLOT, _MIN_SLOTS), _MAX_SLOTS)
    segment = ShmSegment.create(get_table_bytes(num_slots) + capacity_bytes)
    ShmIndex.format(
        segment.buffer,
        num_slots=num_slots,
        capacity_bytes=capacity_bytes,
        max_object_bytes=max_object_bytes,
    )
    return segment
