from __future__ import annotations

import pytest

from sensorium.multimodal.cache.item_table import ByteLru, ItemEntry
from sensorium.types.errors import InvariantError


def add(lru: ByteLru, key: str, num_bytes: int = 10) -> list[str]:
    return [victim.mm_hash for victim in lru.add(make_entry(key, num_bytes))]


def make_entry(key: str, num_bytes: int = 10) -> ItemEntry:
    return ItemEntry(modality="image", mm_hash=key, layout=None, num_bytes=num_bytes, kwargs=None)


def get(lru: ByteLru, key: str) -> ItemEntry:
    entry = lru.get(key)
    assert entry is not None
    return entry


def use(lru: ByteLru, key: str) -> None:
    entry = get(lru, key)
    lru.pin(entry)
    lru.unpin(entry)


def make_lru(*keys: str, capacity_bytes: int = 30) -> ByteLru:
    lru = ByteLru(capacity_bytes)
    for key in keys:
        add(lru, key)
    return lru


def test_the_least_recently_used_goes_first() -> None:
    lru = make_lru("a", "b", "c")
    use(lru, "a")
    assert add(lru, "d") == ["b"]
    assert {entry.mm_hash for entry in lru} == {"a", "c", "d"}


def test_no_more_is_evicted_than_the_room_that_is_needed() -> None:
    lru = make_lru("a", "b", "c")
    assert add(lru, "d", 20) == ["a", "b"]
    assert (len(lru), lru.num_bytes) == (2, 30)


def test_an_entry_that_just_fits_evicts_nothing() -> None:
    assert add(make_lru("a", "b"), "c") == []


def test_queries_change_neither_order_nor_content() -> None:
    lru = make_lru("a", "b", "c")
    lru.get("a")
    assert lru.can_add(30)
    assert not lru.can_add(31)
    assert lru.num_bytes == 30
    assert add(lru, "d") == ["a"]


def test_a_pinned_entry_is_passed_over() -> None:
    lru = make_lru("a", "b", "c")
    lru.pin(get(lru, "a"))
    assert add(lru, "d") == ["b"]


def test_pinned_bytes_do_not_count_as_room() -> None:
    lru = make_lru("a", "b", "c")
    lru.pin(get(lru, "a"))
    assert lru.can_add(20)
    assert not lru.can_add(21)
    with pytest.raises(InvariantError):
        add(lru, "d", 21)
    assert lru.num_bytes == 30


def test_an_entry_with_two_pins_is_held_by_the_second() -> None:
    lru = make_lru("a", "b", "c")
    entry = get(lru, "a")
    lru.pin(entry)
    lru.pin(entry)
    lru.unpin(entry)
    assert not lru.can_add(30)
    lru.unpin(entry)
    assert lru.can_add(30)


def test_the_end_of_the_last_pin_is_a_use() -> None:
    lru = make_lru("a", "b", "c")
    entry = get(lru, "a")
    lru.pin(entry)
    lru.unpin(entry)
    assert add(lru, "d", 20) == ["b", "c"]


def test_a_pin_of_a_removed_entry_does_not_hold_its_successor() -> None:
    lru = make_lru("a")
    old = get(lru, "a")
    lru.pin(old)
    lru.remove(old)
    assert (len(lru), lru.num_bytes, lru.can_add(30)) == (0, 0, True)
    add(lru, "a")
    new = get(lru, "a")
    lru.pin(new)
    lru.unpin(old)
    assert not lru.can_add(30)


def test_an_entry_that_is_added_again_has_its_pins() -> None:
    lru = make_lru()
    entry = make_entry("a")
    lru.pin(entry)
    lru.add(entry)
    assert not lru.can_add(30)
    lru.unpin(entry)
    assert lru.can_add(30)
    assert add(lru, "b", 30) == ["a"]


def test_unpinning_twice_is_refused() -> None:
    lru = make_lru("a")
    with pytest.raises(InvariantError):
        lru.unpin(get(lru, "a"))


def test_a_key_is_not_added_twice() -> None:
    lru = make_lru("a")
    with pytest.raises(InvariantError):
        add(lru, "a")


def test_using_a_pinned_entry_does_not_make_it_evictable() -> None:
    lru = make_lru("a", "b", "c")
    lru.pin(get(lru, "c"))
    use(lru, "c")
    assert add(lru, "d", 20) == ["a", "b"]
