"""No request starves: what arrives later can't hold up an earlier one for ever."""

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
# When a prompt is long, and how long such a prompt pauses: see `Limits`.
long_limits = st.fixed_dictionaries(
    {
        "long_prefill_token_threshold": st.sampled_from((0, 1, 3, 6)),
        "long_prefill_pause": st.sampled_from((0, 2)),
    }
)
thorough = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Crowd:
    """Keeps `num_waiting` requests in the queue, made after `models` in turn."""

    def __init__(
        self,
        driver: SchedulerDriver,
        models: Sequence[EngineCoreRequest],
        *,
        num_waiting: int,
        is_salted: bool,
    ) -> None:
        self._driver = driver
        self._models = models
        self._num_waiting = num_waiting
        self._is_salted = is_salted
        self._numbers = count()

    def step(self) -> None:
        for _ in range(self._num_waiting - len(self._driver.scheduler.waiting)):
            number = next(self._numbers)
            model = self._models[number % len(self._models)]
            request = replace(
                model,
                request_id=f"crowd {number}",
                priority=LEAST_PRIORITY,
                cache_salt=str(number) if self._is_salted else model.cache_salt,
            )
            self._driver.add(request)
        self._driver.step()

    def check_target_ends_in_time(self) -> None:
        for _ in range(self._driver.get_step_bound()):
            self.step()
            if TARGET not in self._driver.open:
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
    models = data.draw(st.lists(requests, min_size=1, max_size=3))
    crowd = Crowd(driver, models, num_waiting=num_waiting, is_salted=is_salted)
    crowd.check_target_ends_in_time()


@st.composite
def visual_requests(draw: st.DrawFn, *, items: Sequence[str], max_tokens: int) -> EngineCoreRequest:
    """Nothing but media, with one token between them."""
    chosen = draw(st.lists(st.sampled_from(items), min_size=1, max_size=3))
    spaced = [part for item in chosen for part in ((1,), item)]
    return make_request(
        TARGET, *spaced, (1,), sampling_params=SamplingParams(max_tokens=max_tokens)
    )


def make_driver(
    limits: Limits, *, policy: str = "fcfs", block_size: int = 4, num_blocks: int = 60
) -> SchedulerDriver:
    groups = (KVCacheGroup(num_blocks=num_blocks),)
    return SchedulerDriver(limits, CacheSizes(block_size=block_size, groups=groups), policy)


@settings(thorough, max_examples=300)
@given(
    data=st.data(),
    budget=st.one_of(st.integers(2, 10), st.none()),
    max_num_encoder_embeds=st.sampled_from((1, 6, 12)),
    is_whole=st.booleans(),
    num_first=st.integers(1, 6),
    num_before=st.integers(1, 6),
    num_steps_before=st.integers(0, 5),
    long=long_limits,
)
def test_item_as_large_as_the_encoder_cache_is_not_starved_by_smaller_ones(
    data: st.DataObject,
    budget: int | None,
    max_num_encoder_embeds: int,
    is_whole: bool,
    num_first: int,
    num_before: int,
    num_steps_before: int,
    long: dict[str, int],
) -> None:
    small = visual_requests(items=("two", "three", "rows"), max_tokens=1)
    models = data.draw(st.lists(small, min_size=1, max_size=2))
    limits = Limits(
        max_model_len=MAX_MODEL_LEN,
        # With as much as the crowd brings, each step ends at the same place: mostly in an item.
        max_num_batched_tokens=budget or sum(len(model.prompt_token_ids) for model in models),
        max_num_seqs=4,
        encoder_cache_size=6,
        max_num_encoder_embeds=max_num_encoder_embeds,
        bidirectional_modalities=frozenset({"image"}) if is_whole else frozenset(),
        **long,
    )
    driver = make_driver(limits, policy="priority")
    driver.add(
        make_request("before", (1,) * num_before, sampling_params=SamplingParams(max_tokens=1))
    )
    crowd = Crowd(driver, models, num_waiting=4, is_salted=True)
    for _ in range(num_steps_before):
        crowd.step()
    assert driver.add(make_request(TARGET, (1,) * num_first, "six", (1,), "six"))
    crowd.check_target_ends_in_time()


@settings(thorough, max_examples=200)
@given(
    budget=st.integers(8, 13),
    num_first=st.integers(1, 14),
    encoder_cache_size=st.sampled_from((6, 20)),
    max_num_encoder_embeds=st.sampled_from((6, 20)),
    long=long_limits,
)
def test_small_item_is_not_starved_by_deferred_spans(
    budget: int,
    num_first: int,
    encoder_cache_size: int,
    max_num_encoder_embeds: int,
    long: dict[str, int],
) -> None:
    limits = Limits(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        encoder_cache_size=encoder_cache_size,
        max_num_encoder_embeds=max_num_encoder_embeds,
        bidirectional_modalities=frozenset({"image"}),
        **long,
    )
    driver = make_driver(limits)
    params = SamplingParams(max_tokens=1)
    assert driver.add(make_request(TARGET, (1,) * num_first, "three", sampling_params=params))
    model = make_request("model", "six", (1,), sampling_params=params)
    Crowd(driver, [model], num_waiting=4, is_salted=True).check_target_ends_in_time()


@settings(thorough, max_examples=400)
@given(
    data=st.data(),
    item=st.sampled_from(("three", "six")),
    num_readers=st.integers(1, 3),
    num_spare=st.integers(1, 3),
    num_blocks=st.integers(10, 24),
    long=long_limits,
)
def test_decoding_requests_continue_although_spans_take_the_blocks(
    data: st.DataObject,
    item: str,
    num_readers: int,
    num_spare: int,
    num_blocks: int,
    long: dict[str, int],
) -> None:
    """Each step has room for the readers, or for a span and a few of them, but not for all."""
    limits = Limits(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=LAYOUTS[item][0] + min(num_spare, num_readers) - 1,
        max_num_seqs=4,
        encoder_cache_size=20,
        max_num_encoder_embeds=20,
        bidirectional_modalities=frozenset({"image"}),
        **long,
    )
    driver = make_driver(limits, block_size=1, num_blocks=num_blocks)
    for index in range(num_readers):
        num_prompt = data.draw(st.integers(1, 4))
        params = SamplingParams(max_tokens=9 - num_prompt)
        request_id = TARGET if index == 0 else f"reader {index}"
        driver.add(make_request(request_id, (1,) * num_prompt, sampling_params=params))
    model = make_request("model", (1,), item, sampling_params=SamplingParams(max_tokens=2))
    Crowd(driver, [model], num_waiting=4, is_salted=True).check_target_ends_in_time()
