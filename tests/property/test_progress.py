"""Nobody starves: what arrives later can't hold up an earlier request for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sensorium.core.admission import Limits
from sensorium.types.request import EngineCoreRequest
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import KVCacheGroup

from .scheduler_driver import SchedulerDriver
from .strategies import (
    LAYOUTS,
    MAX_MODEL_LEN,
    CacheSizes,
    cache_sizes,
    core_requests,
    limits,
    make_request,
)

LEAST_PRIORITY = 2
TARGET = "target"
thorough = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check_target_ends_in_time(
    driver: SchedulerDriver,
    arrivals: Sequence[EngineCoreRequest],
    *,
    num_waiting: int,
    is_salted: bool,
) -> None:
    """Run, with always `num_waiting` newer requests in the queue, until the target has ended."""
    numbers = count()
    for _ in range(driver.get_step_bound()):
        for _ in range(num_waiting - len(driver.scheduler.waiting)):
            number = next(numbers)
            arrival = arrivals[number % len(arrivals)]
            driver.add(
                replace(
                    arrival,
                    request_id=f"after {number}",
                    priority=LEAST_PRIORITY,
                    cache_salt=str(number) if is_salted else arrival.cache_salt,
                )
            )
        driver.step()
        if TARGET not in driver.open:
            return
    raise AssertionError("it starves")


@settings(thorough, max_examples=200)
@given(
    data=st.data(),
    limits=limits(),
    sizes=cache_sizes(),
    policy=st.sampled_from(("fcfs", "priority")),
    num_ahead=st.integers(0, 2),
    num_waiting=st.integers(1, 3),
    is_salted=st.booleans(),
)
def test_request_ends_in_time_however_many_come_after_it(
    data: st.DataObject,
    limits: Limits,
    sizes: CacheSizes,
    policy: str,
    num_ahead: int,
    num_waiting: int,
    is_salted: bool,
) -> None:
    driver = SchedulerDriver(limits, sizes, policy)
    requests = core_requests(is_encoder_decoder=limits.is_encoder_decoder)
    for index in range(num_ahead):
        driver.add(replace(data.draw(requests), request_id=f"ahead {index}"))
    assume(driver.add(replace(data.draw(requests), request_id=TARGET)))
    arrivals = data.draw(st.lists(requests, min_size=1, max_size=3))
    check_target_ends_in_time(driver, arrivals, num_waiting=num_waiting, is_salted=is_salted)


@st.composite
def visual_requests(draw: st.DrawFn, *, items: Sequence[str], max_tokens: int) -> EngineCoreRequest:
    """Nothing but media, with one token between them."""
    chosen = draw(st.lists(st.sampled_from(items), min_size=1, max_size=3))
    spaced = [part for item in chosen for part in ((1,), item)]
    return make_request(
        TARGET, *spaced, (1,), sampling_params=SamplingParams(max_tokens=max_tokens)
    )


def make_driver(limits: Limits, *, block_size: int = 4, num_blocks: int = 60) -> SchedulerDriver:
    groups = (KVCacheGroup(num_blocks=num_blocks),)
    return SchedulerDriver(limits, CacheSizes(block_size=block_size, groups=groups), "fcfs")


@settings(thorough, max_examples=300)
@given(
    data=st.data(),
    budget=st.one_of(st.integers(2, 10), st.none()),
    max_num_encoder_embeds=st.sampled_from((1, 6, 12)),
    is_whole=st.booleans(),
    num_first=st.integers(1, 6),
    has_reader_ahead=st.booleans(),
)
def test_item_as_large_as_the_encoder_cache_is_not_starved_by_smaller_ones(
    data: st.DataObject,
    budget: int | None,
    max_num_encoder_embeds: int,
    is_whole: bool,
    num_first: int,
    has_reader_ahead: bool,
) -> None:
    small = visual_requests(items=("two", "three", "rows"), max_tokens=1)
    arrivals = data.draw(st.lists(small, min_size=1, max_size=2))
    # With a budget of what arrives, each step ends at the same place: always inside an item.
    num_arriving = sum(len(arrival.prompt_token_ids) for arrival in arrivals)
    limits = Limits(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=budget or num_arriving,
        max_num_seqs=4,
        encoder_cache_size=6,
        max_num_encoder_embeds=max_num_encoder_embeds,
        needs_whole_spans=is_whole,
    )
    driver = make_driver(limits)
    if has_reader_ahead:
        driver.add(make_request("ahead", (1,), sampling_params=SamplingParams(max_tokens=8)))
    assert driver.add(make_request(TARGET, (1,) * num_first, "six", (1,), "six"))
    check_target_ends_in_time(driver, arrivals, num_waiting=4, is_salted=True)


@settings(thorough, max_examples=200)
@given(
    budget=st.integers(8, 13),
    num_first=st.integers(1, 14),
    encoder_cache_size=st.sampled_from((6, 20)),
    max_num_encoder_embeds=st.sampled_from((6, 20)),
)
def test_small_item_is_not_starved_by_deferred_spans(
    budget: int, num_first: int, encoder_cache_size: int, max_num_encoder_embeds: int
) -> None:
    limits = Limits(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        encoder_cache_size=encoder_cache_size,
        max_num_encoder_embeds=max_num_encoder_embeds,
        needs_whole_spans=True,
    )
    driver = make_driver(limits)
    params = SamplingParams(max_tokens=1)
    assert driver.add(make_request(TARGET, (1,) * num_first, "three", sampling_params=params))
    arrival = make_request("after", "six", (1,), sampling_params=params)
    check_target_ends_in_time(driver, [arrival], num_waiting=4, is_salted=True)


@settings(thorough, max_examples=400)
@given(
    data=st.data(),
    item=st.sampled_from(("three", "six")),
    num_readers=st.integers(1, 3),
    num_spare=st.integers(1, 3),
    num_blocks=st.integers(10, 24),
)
def test_readers_go_on_although_spans_take_the_blocks(
    data: st.DataObject, item: str, num_readers: int, num_spare: int, num_blocks: int
) -> None:
    """Each step has room for the readers, or for a span and a few of them, but not for all."""
    limits = Limits(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=LAYOUTS[item][0] + min(num_spare, num_readers) - 1,
        max_num_seqs=4,
        encoder_cache_size=20,
        max_num_encoder_embeds=20,
        needs_whole_spans=True,
    )
    driver = make_driver(limits, block_size=1, num_blocks=num_blocks)
    for index in range(num_readers):
        num_prompt = data.draw(st.integers(1, 4))
        params = SamplingParams(max_tokens=9 - num_prompt)
        request_id = TARGET if index == 0 else f"reader {index}"
        driver.add(make_request(request_id, (1,) * num_prompt, sampling_params=params))
    arrival = make_request("after", (1,), item, sampling_params=SamplingParams(max_tokens=2))
    check_target_ends_in_time(driver, [arrival], num_waiting=4, is_salted=True)
