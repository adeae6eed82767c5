"""The cost of a step does not grow with what a request has computed or still needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sensorium.core.kv_cache_manager import KVCacheManager, PrefixHit
from sensorium.core.request import Request
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange
from tests.property.scheduler_driver import SchedulerDriver
from tests.property.strategies import make_request

from .building import make_driver, tokens

NUM_ITEMS = 2000


class CountedFeatures(tuple[MultiModalFeatureSpec, ...]):
    """Counts how often an item is looked at."""

    num_looks = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        CountedFeatures.num_looks += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[MultiModalFeatureSpec]:
        CountedFeatures.num_looks += len(self)
        return super().__iter__()


def make_long_driver() -> SchedulerDriver:
    """A request with thousands of items, all computed but the last hundred tokens."""
    num_tokens = 2 * NUM_ITEMS
    driver = make_driver(
        max_model_len=2 * num_tokens,
        num_blocks=num_tokens + 100,
        max_num_batched_tokens=num_tokens - 100,
        encoder_cache_size=num_tokens,
        max_num_encoder_embeds=num_tokens,
    )
    features = [
        MultiModalFeatureSpec(
            modality="audio", mm_hash=f"frame {index}", mm_position=PlaceholderRange(2 * index, 1)
        )
        for index in range(NUM_ITEMS)
    ]
    request = make_request("r", (1,) * num_tokens, sampling_params=tokens(50))
    driver.add(replace(request, mm_features=CountedFeatures(features)))
    driver.step()
    return driver


def get_num_looks(driver: SchedulerDriver, *, is_step: bool) -> int:
    CountedFeatures.num_looks = 0
    if is_step:
        output = driver.scheduler.schedule()
        looks = CountedFeatures.num_looks
        result = driver.worker.execute(output, token_id=1)
        CountedFeatures.num_looks = looks
        driver.take(driver.scheduler.update_from_output(output, result))
    else:
        driver.abort("r")
    return CountedFeatures.num_looks


def test_step_looks_at_few_of_many_items() -> None:
    driver = make_long_driver()
    driver.scheduler.limits = replace(driver.limits, max_num_batched_tokens=4)
    assert 0 < get_num_looks(driver, is_step=True) < 200
    driver.step()
    assert 0 < get_num_looks(driver, is_step=True) < 200


def test_abort_looks_at_what_is_held_only() -> None:
    driver = make_long_driver()
    driver.step()
    driver.step()
    assert get_num_looks(driver, is_step=False) == 0


def test_queue_that_finds_no_room_is_not_searched_for_a_prefix_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = []

    def find_prefix(cache: KVCacheManager, request: Request, max_tokens: int) -> PrefixHit:
        searched.append(request.request_id)
        return original(cache, request, max_tokens)

    original = KVCacheManager.find_prefix
    monkeypatch.setattr(KVCacheManager, "find_prefix", find_prefix)
    driver = make_driver(num_blocks=20, max_num_batched_tokens=30)
    driver.add(make_request("reader", (1,) * 8, sampling_params=tokens(9)))
    driver.step()
    driver.add(make_request("waiting", (2,) * 15, sampling_params=tokens(1)))
    driver.step()
    searched.clear()
    for _ in range(4):
        driver.step()
    assert searched == []
    driver.abort("reader")
    driver.step()
    assert searched == ["waiting"]


def test_nothing_is_searched_when_no_tokens_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver(max_num_batched_tokens=4)
    driver.add(make_request("long", (1,) * 20))
    driver.step()
    driver.add(make_request("waiting", (2,) * 3))
    monkeypatch.setattr(driver.kv_cache, "find_prefix", None)
    driver.step()


def test_search_for_a_prefix_passes_each_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every border between two blocks lies inside a span here."""
    num_blocks = 200
    cache = make_driver(block_size=4, num_blocks=2 * num_blocks).kv_cache
    prompt = (1,) * (4 * num_blocks)
    first = Request(make_request("first", prompt), rank=(0, 0), block_size=4)
    assert cache.allocate(first, len(prompt)) is not None
    first.num_computed_tokens = len(prompt)
    cache.commit(first)
    spans = tuple((4 * index - 2, 4 * index + 1) for index in range(1, num_blocks))
    second = Request(make_request("second", prompt), rank=(0, 1), block_size=4, spans=spans)
    lookups = 0
    original = type(cache._pools[0]).get_cached

    def get_cached(pool: Any, name: bytes) -> int | None:
        nonlocal lookups
        lookups += 1
        return original(pool, name)

    monkeypatch.setattr(type(cache._pools[0]), "get_cached", get_cached)
    assert cache.find_prefix(second, len(prompt) - 1).num_tokens == 0
    assert lookups <= 2 * num_blocks
