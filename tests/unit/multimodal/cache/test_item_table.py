from __future__ import annotations

import logging
import weakref

import pytest
import torch

from sensorium.multimodal.cache.interface import ItemHandle, ProcessorCache
from sensorium.multimodal.cache.item_table import ItemTable
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import ProcessedItem

from .item_building import LAYOUT, is_same, make_item, make_kwargs


def use(cache: ProcessorCache, item: ProcessedItem, *, needs_layout: bool = True) -> ItemHandle:
    """Return a handle that is already released."""
    handle = cache.get_and_update_item(item.mm_hash, item, needs_layout=needs_layout)
    assert handle is not None
    cache.release([handle])
    return handle


def counts(cache: ProcessorCache) -> tuple[int, int]:
    statistics = cache.statistics()
    return statistics.num_queries, statistics.num_hits


def test_a_miss_counts_once_although_the_caller_comes_twice() -> None:
    cache = ItemTable(1024)
    assert cache.get_and_update_item("a") is None
    assert counts(cache) == (0, 0)
    handle = use(cache, make_item("a"))
    assert not handle.is_hit
    assert counts(cache) == (1, 0)


def test_a_hit_has_tensors_and_layout() -> None:
    cache = ItemTable(1024)
    use(cache, make_item("a"))
    handle = cache.get_and_update_item("a")
    assert handle is not None
    assert handle.is_hit
    assert handle.layout == LAYOUT
    assert handle.num_bytes == 128
    assert handle.kwargs is not None
    assert is_same(handle.kwargs, make_kwargs("a"))
    assert counts(cache) == (2, 1)


def test_an_item_given_for_a_cached_one_is_a_hit() -> None:
    cache = ItemTable(1024)
    use(cache, make_item("a"))
    assert use(cache, make_item("a")).is_hit
    assert counts(cache) == (2, 1)


def test_is_cached_changes_neither_order_nor_statistics() -> None:
    cache = ItemTable(256)
    use(cache, make_item("a"))
    use(cache, make_item("b"))
    before = cache.statistics()
    assert cache.is_cached("a")
    assert not cache.is_cached("c")
    assert cache.statistics() == before
    use(cache, make_item("c"))
    assert not cache.is_cached("a")


def test_a_use_saves_from_eviction() -> None:
    cache = ItemTable(256)
    use(cache, make_item("a"))
    use(cache, make_item("b"))
    assert use(cache, make_item("a")).is_hit
    use(cache, make_item("c"))
    assert cache.is_cached("a")
    assert not cache.is_cached("b")
    assert cache.statistics().num_evictions == 1


def test_an_item_that_a_request_holds_is_not_evicted() -> None:
    cache = ItemTable(256)
    held = cache.get_and_update_item("a", make_item("a"))
    assert held is not None
    for mm_hash in ("b", "c", "d"):
        use(cache, make_item(mm_hash))
    assert cache.is_cached("a")
    cache.release([held])
    use(cache, make_item("e", 256))
    assert not cache.is_cached("a")


def test_an_item_larger_than_the_cache_is_served_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = ItemTable(64)
    use(cache, make_item("small", 64))
    with caplog.at_level(logging.WARNING):
        handles = [use(cache, make_item("large")), use(cache, make_item("other"))]
    assert all(is_same(handle.kwargs or {}, make_kwargs(handle.mm_hash)) for handle in handles)
    assert len(caplog.records) == 1
    assert cache.is_cached("small")
    assert not cache.is_cached("large")
    assert cache.statistics().num_oversize == 2
    assert counts(cache) == (3, 0)


def test_an_item_that_finds_everything_pinned_is_served_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = ItemTable(128)
    assert cache.get_and_update_item("a", make_item("a")) is not None
    handle = use(cache, make_item("b"))
    assert handle.kwargs is not None
    assert not cache.is_cached("b")
    assert cache.statistics().num_oversize == 1
    assert caplog.records == []


def test_an_entry_without_a_layout_is_no_hit_if_one_is_needed() -> None:
    cache = ItemTable(1024)
    use(cache, make_item("a", layout=None), needs_layout=False)
    assert cache.get_and_update_item("a") is None
    assert not cache.is_cached("a")
    assert counts(cache) == (1, 0)
    assert cache.is_cached("a", needs_layout=False)
    handle = cache.get_and_update_item("a", needs_layout=False)
    assert handle is not None
    assert handle.is_hit
    assert handle.layout is None
    assert counts(cache) == (2, 1)


def test_the_processed_item_completes_an_entry_without_a_layout() -> None:
    cache = ItemTable(1024)
    use(cache, make_item("a", layout=None), needs_layout=False)
    handle = use(cache, make_item("a"))
    assert not handle.is_hit
    assert handle.layout == LAYOUT
    assert counts(cache) == (2, 0)
    assert cache.get_and_update_item("a") is not None
    assert cache.statistics().num_items == 1


def test_a_second_injection_that_brings_the_layout_hits_and_completes() -> None:
    cache = ItemTable(1024)
    use(cache, make_item("a", layout=None), needs_layout=False)
    assert use(cache, make_item("a"), needs_layout=False).is_hit
    assert cache.is_cached("a")
    use(cache, make_item("a", layout=None), needs_layout=False)
    assert cache.is_cached("a")


def test_handles_stay_good_when_the_cache_is_cleared() -> None:
    cache = ItemTable(128)
    old = cache.get_and_update_item("a", make_item("a"))
    assert old is not None
    cache.clear_cache()
    assert cache.statistics().num_items == cache.statistics().num_bytes == 0
    new = cache.get_and_update_item("a", make_item("a"))
    cache.release([old])
    use(cache, make_item("b"))
    assert cache.is_cached("a"), "the release of a handle of a cleared entry took the new one's pin"
    assert old.kwargs is not None
    assert new is not None


def test_a_handle_is_released_once() -> None:
    cache = ItemTable(128)
    handle = use(cache, make_item("a"))
    with pytest.raises(InvariantError):
        cache.release([handle])


def test_an_item_is_not_kept_under_another_hash() -> None:
    with pytest.raises(InvariantError):
        ItemTable(128).get_and_update_item("a", make_item("b"))


def test_evicted_tensors_are_freed() -> None:
    cache = ItemTable(128)
    item = make_item("a")
    tensor = weakref.ref(item.kwargs["pixels"])
    use(cache, item)
    del item
    assert tensor() is not None
    use(cache, make_item("b"))
    assert tensor() is None


def test_a_part_of_a_larger_tensor_does_not_keep_the_whole() -> None:
    cache = ItemTable(1024)
    batch = torch.arange(64.0).reshape(4, 16)
    use(cache, ProcessedItem(modality="image", mm_hash="a", kwargs={"x": batch[1]}, layout=None))
    handle = cache.get_and_update_item("a", needs_layout=False)
    assert handle is not None
    assert handle.kwargs is not None
    assert handle.kwargs["x"].untyped_storage().nbytes() == 64
    assert torch.equal(handle.kwargs["x"], batch[1])
