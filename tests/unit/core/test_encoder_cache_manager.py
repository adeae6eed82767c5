from __future__ import annotations

import pytest

from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.request import Request
from sensorium.types.errors import InvariantError
from tests.property.strategies import make_request


def make(request_id: str, *items: str, cache_salt: str | None = None) -> Request:
    core_request = make_request(request_id, *items, cache_salt=cache_salt)
    return Request(core_request, rank=(0, 0), block_size=4)


def compute(cache: EncoderCacheManager, request: Request, mm_index: int = 0) -> None:
    cache.allocate(request, mm_index)
    cache.mark_computed(request.get_encoder_key(mm_index))


def test_entry_is_kept_until_its_last_use() -> None:
    cache = EncoderCacheManager(3)
    request = make("r", "three", "three")
    compute(cache, request, 0)
    assert cache.check_and_update_cache(request, 1)
    cache.free_encoder_input(request, 0)
    assert not cache.is_evictable("three")
    assert not cache.can_allocate(1)
    cache.free_encoder_input(request, 1)
    assert cache.is_evictable("three")
    assert cache.can_allocate(3)


def test_two_requests_share_an_entry() -> None:
    cache = EncoderCacheManager(3)
    first, second = make("first", "three"), make("second", "three")
    compute(cache, first)
    assert cache.check_and_update_cache(second, 0)
    cache.free(first)
    assert not cache.is_evictable("three")
    cache.free(second)
    assert cache.is_evictable("three")
    assert cache.is_computed("three")


def test_salts_do_not_share() -> None:
    cache = EncoderCacheManager(6)
    compute(cache, make("first", "three"))
    assert not cache.check_and_update_cache(make("second", "three", cache_salt="salt"), 0)


def test_freeing_cleans_the_index() -> None:
    cache = EncoderCacheManager(9)
    request = make("r", "three", "two")
    compute(cache, request, 0)
    compute(cache, request, 1)
    assert cache.get_cached_input_ids(request) == {0, 1}
    cache.free_encoder_input(request, 0)
    assert cache.get_cached_input_ids(request) == {1}
    cache.free_encoder_input(request, 1)
    assert cache.get_cached_input_ids(request) == frozenset()
    assert cache.request_cached_ids == {}


def test_freeing_what_is_not_held_does_nothing() -> None:
    cache = EncoderCacheManager(9)
    request = make("r", "three")
    cache.free_encoder_input(request, 0)
    cache.free(request)
    compute(cache, request)
    cache.free_encoder_input(make("other", "three"), 0)
    assert cache.has_reference(request, 0)


def test_queries_evict_nothing() -> None:
    cache = EncoderCacheManager(6)
    request = make("r", "six", "three")
    compute(cache, request)
    cache.free(request)
    before = cache.statistics()
    assert cache.can_allocate(6)
    assert not cache.can_allocate(7)
    assert cache.is_computed("six")
    assert cache.is_evictable("six")
    assert "three" not in cache
    assert cache.statistics() == before
    assert cache.take_freed_keys() == ()


def test_reserved_entry_is_no_hit_until_it_is_computed() -> None:
    cache = EncoderCacheManager(6)
    request = make("r", "three")
    cache.allocate(request, 0)
    assert "three" in cache
    assert not cache.is_computed("three")
    cache.mark_computed("three")
    assert cache.is_computed("three")


def test_reserved_entry_is_not_evicted_although_everyone_left() -> None:
    cache = EncoderCacheManager(3)
    request = make("r", "three")
    cache.allocate(request, 0)
    cache.free(request)
    assert not cache.can_allocate(1)
    cache.mark_computed("three")
    assert cache.is_evictable("three")


def test_eviction_takes_the_least_recently_used_first() -> None:
    cache = EncoderCacheManager(6)
    old, young, new = make("old", "three"), make("young", "two"), make("new", "rows")
    compute(cache, old)
    compute(cache, young)
    cache.free(old)
    cache.free(young)
    cache.allocate(new, 0)
    assert cache.take_freed_keys() == ("three",)
    assert cache.take_freed_keys() == ()
    assert cache.is_computed("two")
    assert cache.statistics().num_evictions == 1


def test_use_makes_an_entry_young_again() -> None:
    cache = EncoderCacheManager(6)
    old, young, new = make("old", "three"), make("young", "two"), make("new", "rows")
    compute(cache, old)
    compute(cache, young)
    cache.free(old)
    cache.free(young)
    cache.check_and_update_cache(old, 0)
    cache.free(old)
    cache.allocate(new, 0)
    assert cache.take_freed_keys() == ("two", "three")


def test_discarding_names_everyone_who_needed_it_and_gives_the_space_back() -> None:
    cache = EncoderCacheManager(3)
    first, second = make("first", "three"), make("second", "three")
    cache.allocate(first, 0)
    cache.check_and_update_cache(second, 0)
    assert cache.discard("three") == {"first", "second"}
    assert cache.request_cached_ids == {}
    assert cache.can_allocate(3)
    assert cache.discard("three") == set()


def test_computed_entry_is_not_discarded() -> None:
    cache = EncoderCacheManager(3)
    compute(cache, make("r", "three"))
    with pytest.raises(InvariantError):
        cache.discard("three")
    assert cache.is_computed("three")


def test_allocating_twice_or_too_much_is_our_bug() -> None:
    cache = EncoderCacheManager(5)
    request = make("r", "three", "six")
    cache.allocate(request, 0)
    with pytest.raises(InvariantError):
        cache.allocate(request, 0)
    with pytest.raises(InvariantError):
        cache.allocate(request, 1)


def test_clearing_leaves_what_is_in_use() -> None:
    cache = EncoderCacheManager(9)
    used, unused = make("used", "three"), make("unused", "two")
    compute(cache, used)
    compute(cache, unused)
    cache.free(unused)
    cache.clear_cache()
    assert cache.take_freed_keys() == ("two",)
    assert cache.is_computed("three")


def test_item_without_embeddings_takes_no_space() -> None:
    cache = EncoderCacheManager(0)
    request = make("r", "empty")
    compute(cache, request)
    assert cache.statistics().num_used_embeds == 0
    assert cache.statistics().num_references == 1
