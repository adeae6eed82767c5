"""Media that several requests want at the same time is processed once.

The requests fail together, and one that is given up leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any

import pytest

from sensorium import CapacityError, RequestError
from sensorium.multimodal.pipeline import MediaPipeline
from tests.integration.media_steps import (
    CACHE_TYPES,
    Calls,
    Gate,
    LlmOf,
    Outcomes,
    QueryCount,
    assert_idle,
    make_new_png,
    make_prompt,
    process,
    process_and_release,
    release,
)
from tests.support.waiting import wait_until

ALL_TYPES = [*CACHE_TYPES, "off"]


def get_num_waiting(pipeline: MediaPipeline) -> int:
    return pipeline.flights.num_waiting


@pytest.mark.parametrize("num_threads", [2, 12])
@pytest.mark.parametrize("cache_type", ALL_TYPES)
def test_concurrent_requests_with_a_new_image_process_it_once(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str, num_threads: int
) -> None:
    llm, data = llm_of(cache_type), make_new_png()
    gate = Gate(monkeypatch)
    calls, queries = Calls(monkeypatch, llm), QueryCount(llm)
    prompts = [make_prompt(data, text=f"question {index}") for index in range(num_threads)]
    outcomes = Outcomes([lambda prompt=prompt: process(llm, prompt) for prompt in prompts])
    wait_until(lambda: get_num_waiting(llm.media_parts.pipeline) == num_threads)
    gate.open()
    results = outcomes.wait()
    assert calls.take() == {"decode": 1, "process": 1, "call": 1}
    assert queries.get() == ((0, 0) if cache_type == "off" else (num_threads, num_threads - 1))
    assert len({result.items[0].handle.mm_hash for result in results}) == 1
    for result in results:
        release(llm, result)


@pytest.mark.parametrize("cache_type", ALL_TYPES)
def test_requests_that_share_images_in_different_orders_do_not_wait_for_each_other(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    llm, images = llm_of(cache_type), [make_new_png() for _ in range(3)]
    calls = Calls(monkeypatch, llm)
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)] * 2
    functions: list[Callable[[], Any]] = [
        lambda order=order: process(llm, make_prompt(*(images[index] for index in order)))  # type: ignore[misc]
        for order in orders
    ]
    results = Outcomes(functions).wait()
    for order, result in zip(orders, results, strict=True):
        hashes = [item.handle.mm_hash for item in result.items]
        assert hashes == [results[0].items[index].handle.mm_hash for index in order]
        release(llm, result)
    if cache_type != "off":
        assert calls.take() == {"decode": 3, "process": 3, "call": 3}


@pytest.mark.parametrize("cache_type", ALL_TYPES)
def test_concurrent_requests_fail_together_on_a_broken_image(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    llm, data = llm_of(cache_type), make_new_png()
    gate = Gate(monkeypatch)
    prompt = make_prompt(data, mm_processor_kwargs={"size": "large"})
    outcomes = Outcomes([lambda: process(llm, prompt) for _ in range(3)])
    wait_until(lambda: get_num_waiting(llm.media_parts.pipeline) == 3)
    gate.open()
    errors = outcomes.wait()
    assert {type(error) for error in errors} == {RequestError}
    (message,) = {str(error) for error in errors}
    assert message.startswith("multi_modal_data.image[0]: the media could not be processed")
    assert len({id(error) for error in errors}) == 3
    assert_idle(llm)
    # A failure is not remembered: the next one tries again.
    with pytest.raises(RequestError, match="could not be processed"):
        process(llm, prompt)
    assert gate.num_entered == 2
    process_and_release(llm, make_prompt(data))


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_an_item_cached_between_the_lookup_and_the_join_is_not_processed_again(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    """The other request runs as a whole after our look into the cache, which found nothing."""
    llm, prompt = llm_of(cache_type), make_prompt(make_new_png())
    cache: Any = llm.media_parts.pipeline.cache
    calls, queries = Calls(monkeypatch, llm), QueryCount(llm)
    look_up = cache.get_and_update_item
    others: list[Any] = []

    def look_up_late(mm_hash: str, item: Any = None, **options: Any) -> Any:
        handle = look_up(mm_hash, item, **options)
        if not others:
            others.append(None)
            others[0] = process(llm, prompt)
        return handle

    monkeypatch.setattr(cache, "get_and_update_item", look_up_late)
    processed = process(llm, prompt)
    assert processed.items[0].handle.is_hit
    assert calls.take() == {"decode": 1, "process": 1, "call": 1}
    assert queries.get() == (2, 1)
    release(llm, processed)
    release(llm, others[0])


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_an_item_evicted_between_the_two_lookups_is_processed_again(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    llm, prompt = llm_of(cache_type), make_prompt(make_new_png())
    cache: Any = llm.media_parts.pipeline.cache
    times = iter([True])

    def is_cached(mm_hash: str, *, needs_layout: bool = True) -> bool:
        del mm_hash, needs_layout
        return next(times, False)  # it was there, and is gone before it can be taken

    monkeypatch.setattr(cache, "is_cached", is_cached)
    calls = Calls(monkeypatch, llm)
    processed = process_and_release(llm, prompt)
    assert not processed.items[0].handle.is_hit
    assert calls.take() == {"decode": 1, "process": 1, "call": 1}


@pytest.mark.parametrize("cache_type", ALL_TYPES)
def test_a_waiter_that_is_cancelled_leaves_the_flight_to_the_others(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    llm, prompt = llm_of(cache_type), make_prompt(make_new_png())
    pipeline = llm.media_parts.pipeline
    gate = Gate(monkeypatch)
    leader = Outcomes([lambda: process(llm, prompt)])
    wait_until(lambda: gate.num_entered == 1)
    cancelled: Future[None] = Future()
    waiter = Outcomes([lambda: process(llm, prompt, cancelled=cancelled)])
    wait_until(lambda: get_num_waiting(pipeline) == 2)
    cancelled.set_result(None)
    assert isinstance(waiter.wait()[0], CancelledError)
    assert get_num_waiting(pipeline) == 1
    gate.open()
    release(llm, leader.wait()[0])
    assert gate.num_entered == 1


class EndlessBackend:
    """Begins with items, and never ends."""

    def __init__(self) -> None:
        self.num_cancelled = 0
        self.num_started = 0

    def start(self, job: object, media: object) -> EndlessBackend.Flight:
        del job, media
        self.num_started += 1
        return EndlessBackend.Flight(self)

    class Flight(Future[Any]):
        def __init__(self, backend: EndlessBackend) -> None:
            super().__init__()
            self._backend = backend

        def cancel(self) -> bool:
            self._backend.num_cancelled += 1
            return super().cancel()


@pytest.mark.parametrize("cache_type", ALL_TYPES)
def test_a_flight_is_cancelled_with_its_last_waiter(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    llm, data = llm_of(cache_type), make_new_png()
    pipeline, backend = llm.media_parts.pipeline, EndlessBackend()
    known = make_new_png()
    process_and_release(llm, make_prompt(known))
    cancelled: list[Future[None]] = [Future(), Future()]
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "backend", backend)
        if cache_type == "off":
            known = data
        outcomes = Outcomes(
            [
                lambda future=future: process(llm, make_prompt(known, data), cancelled=future)  # type: ignore[misc]
                for future in cancelled
            ]
        )
        num_waiting = 4 if cache_type == "off" else 2  # one request joins twice, without a cache
        wait_until(lambda: get_num_waiting(pipeline) == num_waiting)
        cancelled[0].set_result(None)
        wait_until(lambda: get_num_waiting(pipeline) == num_waiting / 2)
        assert backend.num_cancelled == 0
        cancelled[1].set_result(None)
        assert [type(result) for result in outcomes.wait()] == [CancelledError] * 2
    assert (backend.num_started, backend.num_cancelled) == (1, 1)
    assert_idle(llm)
    process_and_release(llm, make_prompt(data))


def test_an_item_that_takes_too_long_is_refused(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, backend = llm_of("lru"), EndlessBackend()
    pipeline = llm.media_parts.pipeline
    monkeypatch.setattr(pipeline, "backend", backend)
    limits = replace(pipeline.limits, process_deadline_s=0.02, process_wait_s=0.02)
    monkeypatch.setattr(pipeline, "limits", limits)
    with pytest.raises(CapacityError, match="the media item could not be processed in time"):
        process(llm, make_prompt(make_new_png()))
    assert backend.num_cancelled == 1
