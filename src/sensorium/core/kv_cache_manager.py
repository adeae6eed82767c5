"""Accounting for KV blocks: the map from the positions of requests to blocks.

Owns the block tables and one `BlockPool` per group of layers. Holds no tensors: `worker.kv_cache`
does.

Invariants:
  1. An allocation gives all blocks that are wanted, in every group, or changes nothing.
  2. A block is findable only after its positions were computed.
  3. In a group with a window, blocks that no later position reads are released; their place holds
     the null block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sensorium.core.block_pool import NULL_BLOCK, BlockPool, BlockPoolStatistics
from sensorium.core.request import Request
from sensorium.types.errors import InvariantError
from sensorium.types.scheduling import BlockIds, KVCacheGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """The longest cached prefix of a request."""

    num_tokens: int
    block_ids: BlockIds  # null blocks before a window


@dataclass(slots=True)
class _BlockTable:
    """One request's blocks in one group."""

    block_ids: list[int] = field(default_factory=list)
    num_passed: int = 0  # leading entries that were released, or never held, because of a window


class KVCacheManager:
    """The block tables of all requests, and the pools that their blocks come from."""

    def __init__(
        self, groups: Sequence[KVCacheGroup], *, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pools = [BlockPool(group.num_blocks) for group in groups]
        self._tables: dict[str, list[_BlockTable]] = {}  # request id -> a table for each group
        self._num_registered: dict[str, int] = {}  # request id -> its first blocks with names

    @property
    def num_releases(self) -> int:
        """The references dropped so far. If it has not changed, there is no new room."""
        return sum(pool.num_releases for pool in self._pools)

    def get_block_ids(self, request_id: str) -> BlockIds:
        return tuple(tuple(table.block_ids) for table in self._tables.get(request_id, ()))

    def can_ever_fit(self, num_tokens: int, max_new_tokens: int) -> bool:
        """Return whether an otherwise empty cache holds a request of `num_tokens`.

        It is computed in steps of at most `max_new_tokens`.
        """
        return all(
            self._num_blocks_at_most(group, num_tokens, max_new_tokens) <= pool.capacity
            for group, pool in zip(self.groups, self._pools, strict=True)
        )

    def _num_blocks_at_most(self, group: KVCacheGroup, num_tokens: int, max_new_tokens: int) -> int:
        total = -(-num_tokens // self.block_size)
        if group.window is None:
            return total
        # A window may begin and end inside a block.
        live = -(-(group.window - 1 + min(max_new_tokens, num_tokens)) // self.block_size) + 1
        return min(total, live)

    def find_prefix(self, request: Request, max_tokens: int) -> PrefixHit:
        """Return the longest cached prefix of at most `max_tokens` tokens. Changes nothing.

        It doesn't end inside an unsplittable span.
        """
        num_blocks = max_tokens // self.block_size if self.enable_prefix_caching else 0
        for group, pool in zip(self.groups, self._pools, strict=True):
            if group.window is None:
                num_blocks = self._leading_hits(request, pool, num_blocks)
        while (shorter := self._get_shorter(request, num_blocks)) is not None:
            num_blocks = shorter
        num_tokens = num_blocks * self.block_size
        block_ids = tuple(
            tuple(self._prefix_blocks(request, index, num_tokens))
            for index in range(len(self.groups))
        )
        return PrefixHit(num_tokens=num_tokens, block_ids=block_ids)

    def _leading_hits(self, request: Request, pool: BlockPool, at_most: int) -> int:
        for index in range(at_most):
            if pool.get_cached(request.block_hash(index)) is None:
                return index
        return at_most

    def _get_shorter(self, request: Request, num_blocks: int) -> int | None:
        """Return the next shorter candidate, or `None` if a prefix of `num_blocks` is usable."""
        span = request.get_split_span(num_blocks * self.block_size)
        if span is not None:
            return span[0] // self.block_size
        return self._window_miss(request, num_blocks)

    def _window_miss(self, request: Request, num_blocks: int) -> int | None:
        """Return the last block that a prefix needs in a group with a window and is not cached.

        Every shorter prefix that reaches beyond it needs it too: the next candidate ends before it.
        """
        for group, pool in zip(self.groups, self._pools, strict=True):
            if group.window is None:
                continue
            first = self._first_live_block(group, num_blocks * self.block_size)
            for index in range(num_blocks - 1, first - 1, -1):
                if pool.get_cached(request.block_hash(index)) is None:
                    return index
        return None

    def _prefix_blocks(self, request: Request, group_index: int, num_tokens: int) -> list[int]:
        first = self._first_live_block(self.groups[group_index], num_tokens)
        pool = self._pools[group_index]
        blocks = [NULL_BLOCK] * first
        for index in range(first, num_tokens // self.block_size):
            block_id = pool.get_cached(request.block_hash(index))
            if block_id is None:
                raise InvariantError(f"block {index} of a prefix hit is not cached")
            blocks.append(block_id)
        return blocks

    def _first_live_block(self, group: KVCacheGroup, num_computed_tokens: int) -> int:
        """Return the first block that a position at or after `num_computed_tokens` reads.

        Position p reads from p - window + 1 on.
        """
        if group.window is None:
            return 0
        return max(0, num_computed_tokens - group.window + 1) // self.block_size

    def allocate(
        self, request: Request, num_tokens: int, hit: PrefixHit | None = None
    ) -> BlockIds | None:
        """Give the request blocks for its first `num_tokens` tokens.

        Return the new ids for each group, or `None` if there is no room. With `hit`, a request that
        has no blocks yet starts on a cached prefix.
        """
        tables = self._tables.get(request.request_id)
        if tables is None:
            return self._start(request, num_tokens, hit)
        self._release_passed(request, tables)
        total = -(-num_tokens // self.block_size)
        counts = [max(0, total - len(table.block_ids)) for table in tables]
        if any(count > pool.num_free for count, pool in zip(counts, self._pools, strict=True)):
            return None
        return self._extend(tables, counts)

    def _start(self, request: Request, num_tokens: int, hit: PrefixHit | None) -> BlockIds | None:
        total = -(-num_tokens // self.block_size)
        prefixes = hit.block_ids if hit else tuple(() for _ in self.groups)
        counts = [total - len(prefix) for prefix in prefixes]
        for pool, prefix, count in zip(self._pools, prefixes, counts, strict=True):
            num_revived = sum(pool.is_free(block_id) for block_id in prefix)
            if count + num_revived > pool.num_free:
                return None
        tables = [_BlockTable() for _ in self.groups]
        for pool, prefix, table in zip(self._pools, prefixes, tables, strict=True):
            for block_id in prefix:
                if block_id != NULL_BLOCK:
                    pool.acquire(block_id)
            table.block_ids.extend(prefix)
            table.num_passed = sum(block_id == NULL_BLOCK for block_id in prefix)
        self._tables[request.request_id] = tables
        self._num_registered[request.request_id] = len(prefixes[0]) if prefixes else 0
        self._extend(tables, counts)
        return tuple(tuple(table.block_ids) for table in tables)

    def _extend(self, tables: list[_BlockTable], counts: list[int]) -> BlockIds:
        new_ids = []
        for pool, table, count in zip(self._pools, tables, counts, strict=True):
            block_ids = pool.allocate(count)
            table.block_ids.extend(block_ids)
            new_ids.append(tuple(block_ids))
        return tuple(new_ids)

    def _release_passed(self, request: Request, tables: list[_BlockTable]) -> None:
        for group, pool, table in zip(self.groups, self._pools, tables, strict=True):
            first = self._first_live_block(group, request.num_computed_tokens)
            if first > table.num_passed:
                passed = table.block_ids[table.num_passed : first]
                pool.release(reversed(passed))
                table.block_ids[table.num_passed : first] = [NULL_BLOCK] * len(passed)
                table.num_passed = first

    def commit(self, request: Request) -> None:
        """Make the blocks findable that `request.num_computed_tokens` has filled."""
        if not self.enable_prefix_caching:
            return
        first = self._num_registered[request.request_id]
        last = request.num_computed_tokens // self.block_size
        for index in range(first, last):
            name = request.block_hash(index)
            for pool, table in zip(self._pools, self._tables[request.request_id], strict=True):
                if table.block_ids[index] != NULL_BLOCK:
                    pool.register(table.block_ids[index], name)
        self._num_registered[request.request_id] = max(first, last)

    def free(self, request_id: str) -> None:
        """Release all blocks of a request, if it has any. The last ones are evicted first."""
        tables = self._tables.pop(request_id, None)
        if tables is None:
            return
        del self._num_registered[request_id]
        for pool, table in zip(self._pools, tables, strict=True):
            pool.release(reversed(table.block_ids))

    def clear_cache(self) -> None:
        for pool in self._pools:
            pool.clear_cache()

    def statistics(self) -> tuple[BlockPoolStatistics, ...]:
        return tuple(pool.statistics() for pool in self._pools)
