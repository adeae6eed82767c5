"""Allocates KV cache blocks of equal size, counts their references and finds them by contents.

Owns reference counts, the names of cached blocks and the order of eviction. Holds neither requests
nor tensors.

Invariants:
  1. A block is either free or has references, never both; the null block is neither.
  2. A block with references is never evicted.
  3. A name (a hash of the contents) has at most one block, and only one that was computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sensorium.types.errors import InvariantError

# Never allocated: stands in block tables for positions that no layer of the group reads any more.
NULL_BLOCK = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPoolStatistics:
    """Counts of the KV cache blocks of a pool, by their use."""

    num_blocks: int
    num_used: int  # requests refer to them
    num_cached: int  # used or free, with computed contents that can be found by name
    num_evictions: int


class BlockPool:
    """A pool of KV cache blocks that requests allocate, share and release.

    A released block keeps its contents and its name, so that a later request with the same tokens
    can reuse it, until it is allocated for something else (evicted).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise InvariantError(f"a pool of KV cache blocks needs at least 2, not {num_blocks}")
        self.num_blocks = num_blocks
        self._num_refs = [0] * num_blocks
        self._name_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}  # name -> block
        # Least recently used first. Blocks without a name go to the front, because nothing is lost
        # when they are used again.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._num_evictions = 0
        self.num_releases = 0  # references dropped so far; blocks become free only when it grows

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        return self.num_blocks - 1

    def get_cached(self, name: bytes) -> int | None:
        return self._block_of.get(name)

    def has_name(self, block_ids: Sequence[int]) -> bool:
        """Return whether the first of these blocks can be found by a name."""
        return bool(block_ids) and self._name_of[block_ids[0]] is not None

    def is_free(self, block_id: int) -> bool:
        return block_id in self._free

    def allocate(self, count: int) -> list[int]:
        """Allocate free blocks with one reference each, and evict the contents that they held."""
        if count > len(self._free):
            raise InvariantError(f"{count} KV blocks are needed, but {len(self._free)} are free")
        return [self._allocate_one() for _ in range(count)]

    def _allocate_one(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        name = self._name_of[block_id]
        if name is not None:
            del self._block_of[name]
            self._name_of[block_id] = None
            self._num_evictions += 1
        self._num_refs[block_id] = 1
        return block_id

    def acquire(self, block_id: int) -> None:
        """Add a reference to a cached block, so that it can't be evicted."""
        if self._num_refs[block_id] == 0:
            del self._free[block_id]
        self._num_refs[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference to each of the blocks, and free those that have no reference left.

        Cached blocks are evicted in the order in which they are given here. Null blocks are
        skipped.
        """
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if self._num_refs[block_id] <= 0:
                raise InvariantError(f"KV block {block_id} was released more often than acquired")
            self._num_refs[block_id] -= 1
            self.num_releases += 1
            if self._num_refs[block_id] == 0:
                self._free[block_id] = None
                if self._name_of[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def register(self, block_id: int, name: bytes) -> None:
        """Let later requests find a computed block by its name, a hash of its contents.

        A block that already has a name keeps it. A second block with the same contents gets none.
        """
        if self._num_refs[block_id] <= 0:
            raise InvariantError(f"KV block {block_id} is cached, but no request refers to it")
        if self._name_of[block_id] is None and name not in self._block_of:
            self._name_of[block_id] = name
            self._block_of[name] = block_id

    def clear_cache(self) -> None:
        """Remove the names of all blocks; requests keep the blocks that they hold."""
        self._block_of.clear()
        self._name_of = [None] * self.num_blocks

    def statistics(self) -> BlockPoolStatistics:
        return BlockPoolStatistics(
            num_blocks=self.num_blocks,
            num_used=self.capacity - len(self._free),
            num_cached=len(self._block_of),
            num_evictions=self._num_evictions,
        )
