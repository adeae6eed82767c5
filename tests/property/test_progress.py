"""Nobody starves: what arrives later can't hold up an earlier request for ever."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sensorium.core.admission import Limits

from .scheduler_driver import SchedulerDriver
from .strategies import CacheSizes, cache_sizes, core_requests, limits

LEAST_PRIORITY = 2


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    limits=limits(),
    sizes=cache_sizes(),
    policy=st.sampled_from(("fcfs", "priority")),
    num_ahead=st.integers(0, 2),
    num_waiting=st.integers(1, 3),
)
def test_request_ends_in_time_however_many_come_after_it(
    data: st.DataObject,
    limits: Limits,
    sizes: CacheSizes,
    policy: str,
    num_ahead: int,
    num_waiting: int,
) -> None:
    driver = SchedulerDriver(limits, sizes, policy)
    requests = core_requests(is_encoder_decoder=limits.is_encoder_decoder)
    for index in range(num_ahead):
        driver.add(replace(data.draw(requests), request_id=f"ahead {index}"))
    target = replace(data.draw(requests), request_id="target")
    assume(driver.add(target))
    arrivals = data.draw(st.lists(requests, min_size=1, max_size=3))
    numbers = count()
    for _ in range(driver.get_step_bound()):
        for _ in range(num_waiting - len(driver.scheduler.waiting)):
            number = next(numbers)
            arrival = arrivals[number % len(arrivals)]
            driver.add(replace(arrival, request_id=f"after {number}", priority=LEAST_PRIORITY))
        driver.step()
        if "target" not in driver.open:
            break
    assert "target" not in driver.open, "it starves"
