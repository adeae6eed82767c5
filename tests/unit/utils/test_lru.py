from __future__ import annotations

from sensorium.utils.lru import LruCache


def test_the_least_recently_used_entry_is_dropped_first() -> None:
    cache: LruCache[str, int] = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]


def test_entries_are_dropped_by_weight() -> None:
    cache: LruCache[str, int] = LruCache(10, lambda _, value: value)
    for key, weight in (("a", 4), ("b", 4), ("c", 4)):
        cache.put(key, weight)
    assert (cache.get("a"), cache.weight, len(cache)) == (None, 8, 2)


def test_an_entry_that_is_too_heavy_drops_only_its_predecessor() -> None:
    cache: LruCache[str, int] = LruCache(10, lambda _, value: value)
    cache.put("a", 3)
    cache.put("b", 4)
    cache.put("b", 11)
    assert (cache.get("a"), cache.get("b"), cache.weight) == (3, None, 3)


def test_a_replaced_entry_is_weighed_once() -> None:
    cache: LruCache[str, int] = LruCache(10, lambda _, value: value)
    cache.put("a", 3)
    cache.put("a", 5)
    assert cache.weight == 5
    cache.remove("a")
    cache.remove("a")
    assert (cache.weight, len(cache)) == (0, 0)


def test_nothing_is_left_after_clearing() -> None:
    cache: LruCache[str, int] = LruCache(10)
    cache.put("a", 3)
    cache.clear()
    assert (cache.get("a"), cache.weight, len(cache)) == (None, 0, 0)
