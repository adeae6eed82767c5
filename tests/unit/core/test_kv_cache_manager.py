from __future__ import annotations

import pytest

from sensorium.core.block_pool import NULL_BLOCK, BlockPool
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.request import Request
from sensorium.types.errors import CapacityError, InvariantError
from sensorium.types.scheduling import KVCacheGroup
from tests.property.strategies import make_request


def make_cache(*windows: int | None, num_blocks: int = 11, block_size: int = 2) -> KVCacheManager:
    groups = [KVCacheGroup(num_blocks=num_blocks, window=window) for window in windows or (None,)]
    return KVCacheManager(groups, block_size=block_size)


def make(request_id: str, num_tokens: int, *, spans: tuple[tuple[int, int], ...] = ()) -> Request:
    core_request = make_request(request_id, (1,) * num_tokens)
    return Request(core_request, rank=(0, 0), block_size=2, spans=spans)


def compute(cache: KVCacheManager, request: Request, num_tokens: int) -> None:
    assert cache.allocate(request, num_tokens) is not None
    request.num_computed_tokens = num_tokens
    cache.commit(request)


def test_only_full_computed_blocks_are_found() -> None:
    cache = make_cache()
    first = make("first", 9)
    assert cache.allocate(first, 7) is not None
    assert cache.find_prefix(make("second", 9), 8).num_tokens == 0
    first.num_computed_tokens = 5
    cache.commit(first)
    hit = cache.find_prefix(make("second", 9), 8)
    assert hit.num_tokens == 4
    assert hit.block_ids == (cache.get_block_ids("first")[0][:2],)


def test_prefix_is_at_most_as_long_as_asked() -> None:
    cache = make_cache()
    compute(cache, make("first", 8), 8)
    assert cache.find_prefix(make("second", 8), 7).num_tokens == 6
    assert cache.find_prefix(make("second", 8), 0).num_tokens == 0


def test_prefix_ends_before_a_span_rather_than_inside_it() -> None:
    cache = make_cache()
    compute(cache, make("first", 12), 12)
    assert cache.find_prefix(make("second", 12, spans=((5, 9),)), 11).num_tokens == 10
    assert cache.find_prefix(make("second", 12, spans=((5, 11),)), 11).num_tokens == 4
    touching = make("second", 12, spans=((1, 5), (5, 11)))
    assert cache.find_prefix(touching, 11).num_tokens == 0


def test_prefix_in_a_window_needs_only_the_blocks_that_are_read() -> None:
    cache = make_cache(3)
    first = make("first", 12)
    compute(cache, first, 8)
    compute(cache, first, 12)
    hit = cache.find_prefix(make("second", 12), 11)
    assert hit.num_tokens == 10
    assert hit.block_ids[0][:4] == (NULL_BLOCK,) * 4
    assert NULL_BLOCK not in hit.block_ids[0][4:]


def test_prefix_is_what_all_groups_hold() -> None:
    cache = make_cache(None, 3, num_blocks=7)
    first = make("first", 12)
    for num_tokens in (4, 8, 12):
        compute(cache, first, num_tokens)
    cache.free("first")
    # In the group with a window, blocks that were passed are the first to go.
    other = Request(make_request("other", (2,) * 4), rank=(0, 1), block_size=2)
    compute(cache, other, 4)
    hit = cache.find_prefix(make("second", 12), 11)
    assert {len(block_ids) for block_ids in hit.block_ids} == {hit.num_tokens // 2}


def test_blocks_behind_the_window_are_released() -> None:
    cache = make_cache(3, num_blocks=6)
    request = make("r", 30)
    for num_tokens in range(2, 31, 2):
        compute(cache, request, num_tokens)
        assert cache.statistics()[0].num_used <= 3


def test_allocation_is_all_or_nothing() -> None:
    cache = KVCacheManager([KVCacheGroup(num_blocks=20), KVCacheGroup(num_blocks=3)], block_size=2)
    request = make("r", 10)
    assert cache.allocate(request, 5) is None
    assert cache.get_block_ids("r") == ()
    assert [pool.num_used for pool in cache.statistics()] == [0, 0]
    assert cache.allocate(request, 4) is not None
    assert cache.allocate(request, 5) is None
    assert [pool.num_used for pool in cache.statistics()] == [2, 2]


def test_cached_blocks_that_are_free_count_as_taken_by_their_reader() -> None:
    cache = make_cache(num_blocks=5)
    compute(cache, make("first", 8), 8)
    cache.free("first")
    second = make("second", 9)
    hit = cache.find_prefix(second, 8)
    assert hit.num_tokens == 8
    assert cache.allocate(second, 9, hit) is None
    assert cache.statistics()[0].num_used == 0


def test_shared_blocks_live_as_long_as_one_reader() -> None:
    cache = make_cache()
    compute(cache, make("first", 4), 4)
    second = make("second", 5)
    hit = cache.find_prefix(second, 4)
    assert cache.allocate(second, 5, hit) is not None
    cache.free("first")
    assert cache.statistics()[0].num_used == 3
    cache.free("second")
    assert cache.statistics()[0].num_used == 0


def test_last_blocks_of_a_request_are_evicted_before_its_first() -> None:
    cache = make_cache(num_blocks=5)
    compute(cache, make("first", 8), 8)
    cache.free("first")
    other = Request(make_request("other", (2,) * 4), rank=(0, 1), block_size=2)
    assert cache.allocate(other, 4) is not None
    assert cache.find_prefix(make("second", 8), 8).num_tokens == 4


def test_cleared_cache_finds_nothing() -> None:
    cache = make_cache()
    compute(cache, make("first", 8), 8)
    cache.clear_cache()
    assert cache.find_prefix(make("second", 8), 8).num_tokens == 0
    assert cache.statistics()[0].num_used == 4


@pytest.mark.parametrize(
    ("window", "num_tokens", "max_new_tokens", "num_blocks"),
    [
        (None, 8, 1, 4),
        (None, 9, 1, 5),
        (3, 100, 1, 3),  # two before and the new one, which may begin and end inside a block
        (3, 100, 4, 4),
        (3, 5, 4, 3),
        (100, 8, 8, 4),
    ],
)
def test_request_fits_if_what_it_needs_at_once_does(
    window: int | None, num_tokens: int, max_new_tokens: int, num_blocks: int
) -> None:
    fitting = make_cache(window, num_blocks=num_blocks + 1)
    assert fitting.can_ever_fit(num_tokens, max_new_tokens)
    if num_blocks > 1:
        tight = make_cache(window, num_blocks=num_blocks)
        assert not tight.can_ever_fit(num_tokens, max_new_tokens)


def test_pool_without_a_usable_block_is_our_bug() -> None:
    with pytest.raises(InvariantError):
        BlockPool(1)


def test_a_block_without_a_holder_gets_no_name() -> None:
    with pytest.raises(InvariantError):
        BlockPool(3).register(1, b"name")


def test_twin_of_a_named_block_stays_without_a_name() -> None:
    pool = BlockPool(4)
    first, duplicate = pool.allocate(2)
    pool.register(first, b"name")
    pool.register(duplicate, b"name")
    assert pool.get_cached(b"name") == first
    pool.release([duplicate])
    assert pool.allocate(1) == [duplicate]  # nothing is lost with it
    assert pool.statistics().num_evictions == 0


def test_reserved_blocks_leave_room_for_another_request() -> None:
    """Without that, a request that finds no room is preempted again and again."""
    cache = make_cache(8, num_blocks=21)
    cache.reserve(make("first", 2), max_model_len=100, max_new_tokens=8)  # 7 blocks of 20
    # Two would have 14, less than three quarters. But another request may need 9.
    with pytest.raises(CapacityError, match="try again later"):
        cache.reserve(make("second", 2), max_model_len=100, max_new_tokens=8)
    cache.free("first")
    cache.reserve(make("second", 2), max_model_len=100, max_new_tokens=8)
