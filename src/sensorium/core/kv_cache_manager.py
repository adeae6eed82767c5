"""Accounting for KV cache blocks: the map from the positions of each request to blocks.

Owns the block tables and one `BlockPool` per group of layers. Holds no tensors: `worker.kv_cache`
does.

Invariants:
  1. An allocation gives all blocks that are needed, in every group, or changes nothing.
  2. Other requests find a block only after its positions were computed.
  3. In a group with a sliding window, blocks that no later position reads are released; the
     block table has the null block in their place.
  4. A group with cross-attention has blocks for the encoded media of a request, not for its tokens.
     They are allocated together. Requests with the same media share all of them, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sensorium.core.block_pool import NULL_BLOCK, BlockPool, BlockPoolStatistics
from sensorium.core.request import Request
from sensorium.types.errors import CapacityError, InvariantError
from sensorium.types.scheduling import BlockIds, KVCacheGroup, find_cross_group

_MAX_RESERVED = 0.75  # the part of a group's blocks for requests that are never preempted
_MIN_DROPPED = 32  # the fewest blocks that `drop_passed` is worth calling for


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """The longest prefix of a request's tokens that the KV cache already holds."""

    num_tokens: int
    # The group with cross-attention has all blocks of the request's media. False: it has none.
    has_media: bool = False
    block_ids: BlockIds  # of each group of layers; null blocks before a sliding window


@dataclass(slots=True)
class _BlockTable:
    """The ids of the KV cache blocks that one request holds in one group of layers."""

    block_ids: list[int] = field(default_factory=list)
    num_passed: int = 0  # leading entries that a sliding window has passed: null blocks


class KVCacheManager:
    """A record of the KV cache blocks of all requests, with a pool for each group of layers."""

    def __init__(
        self, groups: Sequence[KVCacheGroup], *, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pools = [BlockPool(group.num_blocks) for group in groups]
        self._cross_group = find_cross_group(self.groups)
        self._tables: dict[str, list[_BlockTable]] = {}  # request id -> a table for each group
        self._num_registered: dict[str, int] = {}  # request id -> how many first blocks have names
        # Request id -> the most blocks that it may need in each group, which are reserved for it.
        self._reserved: dict[str, list[int]] = {}

    @property
    def num_releases(self) -> int:
        """The number of dropped references; until it grows, a failed allocation fails again."""
        return sum(pool.num_releases for pool in self._pools)

    def get_block_ids(self, request_id: str) -> BlockIds:
        return tuple(tuple(table.block_ids) for table in self._tables.get(request_id, ()))

    def can_ever_fit(
        self, num_tokens: int, max_new_tokens: int, num_cross_positions: int = 0
    ) -> bool:
        """Return whether an empty KV cache fits a request with `max_new_tokens` per step."""
        return all(
            self._num_blocks_at_most(
                group, num_cross_positions if group.is_cross else num_tokens, max_new_tokens
            )
            <= pool.capacity
            for group, pool in zip(self.groups, self._pools, strict=True)
        )

    def _count_blocks(self, request: Request, num_tokens: int) -> list[int]:
        """Return how many blocks the first `num_tokens` of a request need in each group."""
        num_blocks = -(-num_tokens // self.block_size)
        return [
            self._count_media_blocks(request) if group.is_cross else num_blocks
            for group in self.groups
        ]

    def _count_media_blocks(self, request: Request) -> int:
        return -(-request.num_cross_positions // self.block_size)

    def _num_blocks_at_most(self, group: KVCacheGroup, num_tokens: int, max_new_tokens: int) -> int:
        total = -(-num_tokens // self.block_size)
        if group.window is None:
            return total
        # Only the blocks that the current step reads are kept. A sliding window may begin and end
        # inside a block.
        live = -(-(group.window - 1 + min(max_new_tokens, num_tokens)) // self.block_size) + 1
        return min(total, live)

    def find_prefix(self, request: Request, max_tokens: int) -> PrefixHit:
        """Return the longest cached prefix of a request: whole blocks, with at most `max_tokens`.

        The prefix does not end inside an unsplittable span. Its blocks are not acquired before
        `allocate`.
        """
        num_blocks = max_tokens // self.block_size if self.enable_prefix_caching else 0
        for group, pool in zip(self.groups, self._pools, strict=True):
            if group.window is None and not group.is_cross:
                num_blocks = self._leading_hits(request, pool, num_blocks)
        while (shorter := self._get_shorter(request, num_blocks)) is not None:
            num_blocks = shorter
        num_tokens = num_blocks * self.block_size
        media = self._find_media(request)
        block_ids = tuple(
            media if group.is_cross else tuple(self._prefix_blocks(request, index, num_tokens))
            for index, group in enumerate(self.groups)
        )
        return PrefixHit(num_tokens=num_tokens, has_media=bool(media), block_ids=block_ids)

    def _find_media(self, request: Request) -> tuple[int, ...]:
        """Return the blocks that hold a request's media, or an empty tuple if one is missing."""
        if self._cross_group is None or not self.enable_prefix_caching:
            return ()
        pool, block_ids = self._pools[self._cross_group], []
        for index in range(self._count_media_blocks(request)):
            block_id = pool.get_cached(request.media_block_hash(index))
            if block_id is None:
                return ()
            block_ids.append(block_id)
        return tuple(block_ids)

    def _leading_hits(self, request: Request, pool: BlockPool, at_most: int) -> int:
        for index in range(at_most):
            if pool.get_cached(request.block_hash(index)) is None:
                return index
        return at_most

    def _get_shorter(self, request: Request, num_blocks: int) -> int | None:
        """Return a smaller number of blocks to try, or `None` if `num_blocks` can be reused."""
        span = request.get_split_span(num_blocks * self.block_size)
        if span is not None:
            return span[0] // self.block_size
        return self._window_miss(request, num_blocks)

    def _window_miss(self, request: Request, num_blocks: int) -> int | None:
        """Return the last missing block that a sliding window needs to reuse a prefix, or `None`.

        A shorter prefix that contains this block needs it as well, so the next one to try ends
        before it.
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
                raise InvariantError(f"KV block {index} of a cached prefix is not in the cache")
            blocks.append(block_id)
        return blocks

    def _first_live_block(self, group: KVCacheGroup, num_computed_tokens: int) -> int:
        """Return the first block that positions from `num_computed_tokens` on still read."""
        if group.window is None:
            return 0
        # Position p reads from p - window + 1 on.
        return max(0, num_computed_tokens - group.window + 1) // self.block_size

    def allocate(
        self, request: Request, num_tokens: int, hit: PrefixHit | None = None
    ) -> BlockIds | None:
        """Allocate the blocks that a request's first `num_tokens` still lack, and return them.

        A request without blocks starts with the cached blocks of `hit`, which the result includes.
        If a pool has too few free blocks, nothing is allocated, and the result is `None`.
        """
        tables = self._tables.get(request.request_id)
        if tables is None:
            return self._start(request, num_tokens, hit)
        totals = self._count_blocks(request, num_tokens)
        # Blocks that the step under way fills get their names when it has ended. They are released
        # before that only if there is no other way.
        for num_passed in (request.num_computed_tokens, request.num_scheduled_tokens):
            self._release_passed(tables, num_passed)
            counts = [
                max(0, total - len(table.block_ids))
                for total, table in zip(totals, tables, strict=True)
            ]
            if all(count <= pool.num_free for count, pool in zip(counts, self._pools, strict=True)):
                return self._extend(tables, counts)
        return None

    def _start(self, request: Request, num_tokens: int, hit: PrefixHit | None) -> BlockIds | None:
        totals = self._count_blocks(request, num_tokens)
        prefixes = hit.block_ids if hit else tuple(() for _ in self.groups)
        counts = [total - len(prefix) for total, prefix in zip(totals, prefixes, strict=True)]
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

    def _release_passed(self, tables: list[_BlockTable], num_tokens: int) -> None:
        """Release the blocks that no position from `num_tokens` on reads any more."""
        for group, pool, table in zip(self.groups, self._pools, tables, strict=True):
            first = self._first_live_block(group, num_tokens)
            if first > table.num_passed:
                passed = table.block_ids[table.num_passed : first]
                pool.release(reversed(passed))
                table.block_ids[table.num_passed : first] = [NULL_BLOCK] * len(passed)
                table.num_passed = first

    def commit(self, request: Request) -> None:
        """Let later requests reuse the blocks that the computed tokens of a request have filled."""
        if not self.enable_prefix_caching or request.is_stream:  # its blocks depend on its audio
            return
        first = self._num_registered[request.request_id]
        last = request.num_computed_tokens // self.block_size
        for index in range(first, last):
            name = request.block_hash(index)
            tables = self._tables[request.request_id]
            for group, pool, table in zip(self.groups, self._pools, tables, strict=True):
                if not group.is_cross and table.block_ids[index] != NULL_BLOCK:
                    pool.register(table.block_ids[index], name)
        self._num_registered[request.request_id] = max(first, last)

    def reserve(self, request: Request, max_model_len: int, max_new_tokens: int) -> None:
        """Reserve blocks for a request that is never preempted, until `free` is called for it.

        Raise `CapacityError` if all such requests together would need more than `_MAX_RESERVED` of
        the blocks of a group, or leave too few for one other request of `max_model_len` tokens,
        with `max_new_tokens` of them in a step.
        """
        # The first step, which computes the prompt, has more tokens of this request than any later.
        most_new = min(max_model_len, request.num_prompt_tokens + self.block_size)
        counts = [self._num_blocks_at_most(group, max_model_len, most_new) for group in self.groups]
        for index, (count, pool) in enumerate(zip(counts, self._pools, strict=True)):
            total = count + sum(others[index] for others in self._reserved.values())
            other = self._num_blocks_at_most(self.groups[index], max_model_len, max_new_tokens)
            if total > min(_MAX_RESERVED * pool.capacity, pool.capacity - other):
                raise CapacityError(
                    f"the audio streams that are open ({len(self._reserved)}) have set aside "
                    "as much of the KV cache as they may: try again later, or start the engine "
                    "with a larger kv_cache_memory_bytes"
                )
        self._reserved[request.request_id] = counts

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """Return whether a request without blocks could get those of its first `num_tokens` now."""
        counts = self._count_blocks(request, num_tokens)
        return all(n <= pool.num_free for n, pool in zip(counts, self._pools, strict=True))

    def has_passed(self, request: Request) -> bool:
        """Return whether all groups' windows have passed enough blocks to call `drop_passed`."""
        num_tokens = request.num_computed_tokens
        return all(
            self._first_live_block(group, num_tokens) >= _MIN_DROPPED for group in self.groups
        )

    def drop_passed(self, request: Request) -> int:
        """Remove a request's blocks that all windows have passed; return how many tokens they held.

        The remaining tokens are numbered from 0 again.
        """
        tables = self._tables[request.request_id]
        self._release_passed(tables, request.num_computed_tokens)
        count = min(table.num_passed for table in tables)
        for table in tables:
            del table.block_ids[:count]
            table.num_passed -= count
        return count * self.block_size

    def commit_media(self, request: Request) -> None:
        """Let later requests reuse the blocks of a request's media, which its first step filled."""
        if self._cross_group is None or not self.enable_prefix_caching:
            return
        pool = self._pools[self._cross_group]
        table = self._tables[request.request_id][self._cross_group]
        for index, block_id in enumerate(table.block_ids):
            pool.register(block_id, request.media_block_hash(index))

    def free(self, request_id: str) -> None:
        """Release all blocks of a request, if it has any."""
        self._reserved.pop(request_id, None)
        tables = self._tables.pop(request_id, None)
        if tables is None:
            return
        del self._num_registered[request_id]
        for group, pool, table in zip(self.groups, self._pools, tables, strict=True):
            # The last blocks are evicted first: other requests more likely share the first ones.
            # Blocks of media are released so that they are allocated again in the order of their
            # ids, and the next media get consecutive blocks. Blocks without a name are allocated in
            # the reverse order of their release.
            is_forward = group.is_cross and pool.has_name(table.block_ids)
            pool.release(table.block_ids if is_forward else reversed(table.block_ids))

    def clear_cache(self) -> None:
        for pool in self._pools:
            pool.clear_cache()

    def statistics(self) -> tuple[BlockPoolStatistics, ...]:
        return tuple(pool.statistics() for pool in self._pools)
