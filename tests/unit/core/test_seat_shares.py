from __future__ import annotations

from tests.property.scheduler_driver import SchedulerDriver
from tests.property.strategies import make_request

from .building import make_driver, run, tokens


def add_call(driver: SchedulerDriver, group: str, num: int, max_tokens: int = 50) -> None:
    for index in range(num):
        name = f"{group}{index}"
        driver.add(make_request(name, (1,), group=group, sampling_params=tokens(max_tokens)))


def get_running(driver: SchedulerDriver) -> list[str]:
    return [request.request_id for request in driver.scheduler.running]


def test_a_single_call_has_all_seats() -> None:
    driver = make_driver(max_num_seqs=4)
    add_call(driver, "a", 9)
    run(driver)
    assert get_running(driver) == ["a0", "a1", "a2", "a3"]


def test_the_youngest_of_a_call_give_way_to_each_that_comes_down_to_half() -> None:
    driver = make_driver(max_num_seqs=4)
    add_call(driver, "a", 9)
    run(driver, 3)
    driver.add(make_request("x", (2,), sampling_params=tokens(50)))
    run(driver)
    assert get_running(driver) == ["a0", "a1", "a2", "x"]
    for name in ("y", "z"):
        driver.add(make_request(name, (2,), sampling_params=tokens(50)))
    run(driver)
    assert get_running(driver) == ["a0", "a1", "x", "y"]
    run(driver, 5)
    assert get_running(driver) == ["a0", "a1", "x", "y"]
    assert driver.scheduler.counters.num_preemptions == 2


def test_preempted_requests_come_back_when_no_others_wait() -> None:
    driver = make_driver(max_num_seqs=4)
    add_call(driver, "a", 4, max_tokens=9)
    run(driver, 3)
    driver.add(make_request("x", (2,), sampling_params=tokens(1)))
    run(driver)
    assert get_running(driver) == ["a0", "a1", "a2"]  # it has ended at once
    run(driver)
    assert get_running(driver) == ["a0", "a1", "a2", "a3"]
    driver.drain()


def test_the_queue_of_one_call_does_not_delay_later_calls() -> None:
    driver = make_driver(max_num_seqs=4)
    add_call(driver, "a", 50)
    driver.add(make_request("x", (2,), sampling_params=tokens(50)))
    run(driver)
    assert get_running(driver) == ["a0", "a1", "a2", "x"]


def test_two_calls_share_the_seats() -> None:
    driver = make_driver(max_num_seqs=4)
    add_call(driver, "a", 9)
    run(driver)
    add_call(driver, "b", 9)
    run(driver)
    assert get_running(driver) == ["a0", "a1", "b0", "b1"]


def test_single_requests_are_served_in_their_order() -> None:
    driver = make_driver(max_num_seqs=2)
    for name in "abcd":
        driver.add(make_request(name, (1,), sampling_params=tokens(2)))
    assert [list(windows) for windows in run(driver, 4)] == [["a", "b"]] * 2 + [["c", "d"]] * 2
    assert driver.scheduler.counters.num_preemptions == 0


def get_scheduled(driver: SchedulerDriver) -> set[str]:
    (windows,) = run(driver)
    return set(windows)


def test_with_others_a_quarter_of_the_seats_decodes_for_one_call_in_turns() -> None:
    driver = make_driver(max_num_seqs=8, num_blocks=1001)
    add_call(driver, "a", 8)
    run(driver, 3)
    driver.add(make_request("x", (2,), sampling_params=tokens(50)))
    run(driver, 2)
    steps = [get_scheduled(driver) for _ in range(7)]
    assert all("x" in step and len(step) == 3 for step in steps)
    assert set().union(*steps) == {"x", *(f"a{index}" for index in range(7))}
    driver.drain()


def test_a_call_decodes_in_all_its_seats_again_when_others_have_left() -> None:
    driver = make_driver(max_num_seqs=8, num_blocks=1001)
    add_call(driver, "a", 8)
    driver.add(make_request("x", (2,), sampling_params=tokens(4)))
    run(driver, 20)
    assert len(get_scheduled(driver)) == 8


def test_less_urgent_requests_take_no_seats_of_an_urgent_call() -> None:
    driver = make_driver(max_num_seqs=8, num_blocks=1001, policy="priority")
    add_call(driver, "a", 8)
    run(driver, 3)
    for name in ("x", "y"):
        driver.add(make_request(name, (2,), sampling_params=tokens(50), priority=1))
    assert get_scheduled(driver) == {f"a{index}" for index in range(8)}
    driver.add(make_request("z", (2,), sampling_params=tokens(50), priority=-1))
    run(driver)
    assert get_running(driver) == ["z", *(f"a{index}" for index in range(7))]
    assert len(get_scheduled(driver)) == 3
    driver.drain()
