"""One call with many completions leaves half of the seats to others, and all of them end."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sensorium.core.admission import Limits
from sensorium.types.scheduling import KVCacheGroup
from tests.unit.core.building import tokens

from .scheduler_driver import SchedulerDriver
from .strategies import CacheSizes, cache_sizes, core_requests, limits, make_request

thorough = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
CALL = "call"


def make_driver(*, max_num_seqs: int, policy: str = "fcfs") -> SchedulerDriver:
    """With room for everything but seats."""
    limits = Limits(
        max_model_len=100,
        max_num_batched_tokens=1000,
        max_num_seqs=max_num_seqs,
        encoder_cache_size=20,
        max_num_encoder_embeds=20,
    )
    groups = (KVCacheGroup(num_blocks=4000),)
    return SchedulerDriver(limits, CacheSizes(block_size=1, groups=groups), policy)


def count_running(driver: SchedulerDriver, group: str) -> int:
    return sum(request.group == group for request in driver.scheduler.running)


@settings(thorough, max_examples=200)
@given(
    max_num_seqs=st.integers(1, 9),
    num_siblings=st.integers(2, 24),
    max_tokens=st.integers(1, 12),
    arrivals=st.lists(st.integers(0, 4), min_size=1, max_size=30),
    other_tokens=st.integers(1, 5),
)
def test_others_start_at_once_while_they_fit_into_the_other_half(
    max_num_seqs: int,
    num_siblings: int,
    max_tokens: int,
    arrivals: list[int],
    other_tokens: int,
) -> None:
    driver = make_driver(max_num_seqs=max_num_seqs)
    for index in range(num_siblings):
        name = f"sibling {index}"
        driver.add(make_request(name, (1,), group=CALL, sampling_params=tokens(max_tokens)))
    num_others = 0
    for num_new in arrivals:
        for _ in range(num_new):
            num_others += 1
            name = f"other {num_others}"
            driver.add(make_request(name, (2,), sampling_params=tokens(other_tokens)))
        driver.step()
        num_waiting = sum(request.group != CALL for request in driver.scheduler.waiting)
        if num_waiting and max_num_seqs > 1:
            assert count_running(driver, CALL) <= max_num_seqs // 2
    # What was preempted made room for somebody: a seat is not taken and given in turns.
    assert driver.scheduler.counters.num_preemptions <= num_others
    driver.drain()


@settings(thorough, max_examples=100)
@given(
    max_num_seqs=st.integers(1, 8),
    num_siblings=st.integers(2, 16),
    max_tokens=st.integers(1, 8),
    other_tokens=st.integers(1, 8),
    policy=st.sampled_from(("fcfs", "priority")),
)
def test_a_call_ends_in_time_however_many_others_come(
    max_num_seqs: int, num_siblings: int, max_tokens: int, other_tokens: int, policy: str
) -> None:
    """Its share of the seats is its own: in each step one of its completions moves on."""
    driver = make_driver(max_num_seqs=max_num_seqs, policy=policy)
    for index in range(num_siblings):
        name = f"sibling {index}"
        driver.add(make_request(name, (1,), group=CALL, sampling_params=tokens(max_tokens)))
    num_others = 0
    bound = 2 * driver.get_step_bound() + other_tokens
    for _ in range(bound):
        while len(driver.scheduler.waiting) < num_siblings + 2:
            num_others += 1
            name = f"other {num_others}"
            driver.add(make_request(name, (2,), sampling_params=tokens(other_tokens)))
        driver.step()
        if not any(name.startswith("sibling") for name in driver.open):
            return
    raise AssertionError("the call starves")


@settings(thorough, max_examples=200)
@given(
    data=st.data(),
    limits=limits(),
    sizes=cache_sizes(),
    policy=st.sampled_from(("fcfs", "priority")),
    num_requests=st.integers(2, 12),
)
def test_all_requests_of_mixed_calls_end(
    data: st.DataObject, limits: Limits, sizes: CacheSizes, policy: str, num_requests: int
) -> None:
    """With little room of every kind: blocks, tokens, encoder cache and seats."""
    driver = SchedulerDriver(limits, sizes, policy)
    requests = core_requests(
        is_encoder_decoder=limits.is_encoder_decoder, groups=(None, CALL, CALL, "other call")
    )
    for index in range(num_requests):
        driver.add(replace(data.draw(requests), request_id=f"r{index}"))
        if data.draw(st.booleans()):
            driver.step()
    driver.drain()
