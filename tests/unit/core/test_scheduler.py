from __future__ import annotations

import pytest

from sensorium.types.errors import ErrorRecord, RequestError
from sensorium.types.request import FinishReason
from sensorium.types.scheduling import ModelRunnerOutput
from tests.property.strategies import EOS, make_request

from .building import get_windows, make_driver, run, tokens


def test_long_prompt_is_computed_in_chunks_and_sampled_at_its_end() -> None:
    driver = make_driver(max_num_batched_tokens=4)
    driver.add(make_request("r", (1,) * 10, sampling_params=tokens(2)))
    assert run(driver, 4) == [{"r": (0, 4)}, {"r": (4, 8)}, {"r": (8, 10)}, {"r": (10, 11)}]
    assert not driver.open


def test_decoding_continues_during_the_prefill_of_another_request() -> None:
    driver = make_driver(max_num_batched_tokens=4)
    driver.add(make_request("old", (1,) * 3, sampling_params=tokens(9)))
    run(driver)
    driver.add(make_request("new", (2,) * 7))
    assert run(driver, 3) == [
        {"old": (3, 4), "new": (0, 3)},
        {"old": (4, 5), "new": (3, 6)},
        {"old": (5, 6), "new": (6, 7)},
    ]


def test_no_more_requests_run_than_there_are_seats() -> None:
    driver = make_driver(max_num_seqs=2)
    for name in "abc":
        driver.add(make_request(name, (1,), sampling_params=tokens(2)))
    assert run(driver, 3) == [
        {"a": (0, 1), "b": (0, 1)},
        {"a": (1, 2), "b": (1, 2)},
        {"c": (0, 1)},
    ]


def test_lower_priority_values_run_first_then_earlier_arrivals() -> None:
    driver = make_driver(policy="priority", max_num_seqs=1)
    for name, priority in [("late", 2), ("first", 0), ("middle", 1), ("second", 0)]:
        driver.add(make_request(name, (1,), priority=priority, sampling_params=tokens(1)))
    order = [next(iter(windows)) for windows in run(driver, 4)]
    assert order == ["first", "second", "middle", "late"]


def test_first_come_first_served_ignores_priorities() -> None:
    driver = make_driver(policy="fcfs", max_num_seqs=1)
    for name, priority in [("a", 2), ("b", 0)]:
        driver.add(make_request(name, (1,), priority=priority, sampling_params=tokens(1)))
    assert [next(iter(windows)) for windows in run(driver, 2)] == ["a", "b"]


def test_cached_prefix_is_not_computed_again() -> None:
    driver = make_driver(block_size=2)
    driver.add(make_request("a", (1,) * 5, sampling_params=tokens(1)))
    run(driver)
    driver.add(make_request("b", (1,) * 5, (2,) * 2, sampling_params=tokens(1)))
    assert run(driver) == [{"b": (4, 7)}]


def test_at_least_one_token_is_computed_of_a_prompt_that_is_all_cached() -> None:
    driver = make_driver(block_size=2)
    for name in "ab":
        driver.add(make_request(name, (1,) * 4, sampling_params=tokens(1)))
        (windows,) = run(driver)
    assert windows == {"b": (2, 4)}


def test_another_salt_shares_nothing() -> None:
    driver = make_driver(block_size=2)
    for salt in ("x", "y"):
        request = make_request(salt, (1,) * 4, "three", cache_salt=salt, sampling_params=tokens(1))
        driver.add(request)
        output = driver.schedule()
        assert get_windows(output) == {salt: (0, 7)}
        assert len(output.scheduled[0].encoder_inputs) == 1
        driver.finish_step(output, token_id=1)


def test_preempted_request_comes_back_with_the_tokens_it_had_made() -> None:
    driver = make_driver(num_blocks=10, enable_prefix_caching=False)
    driver.add(make_request("old", (1,) * 3, sampling_params=tokens(6)))
    driver.add(make_request("young", (2,) * 2, sampling_params=tokens(5)))
    assert run(driver, 3)[-1] == {"old": (4, 5), "young": (3, 4)}

    output = driver.schedule()
    assert output.stopped_request_ids == ("young",)
    assert get_windows(output) == {"old": (5, 6)}
    driver.finish_step(output, token_id=1)
    assert driver.scheduler.requests["young"].num_preemptions == 1

    run(driver, 2)
    assert "old" not in driver.open
    output = driver.schedule()
    (started,) = output.started
    assert started.request.request_id == "young"
    assert started.output_token_ids == (1, 1, 1)
    assert get_windows(output) == {"young": (0, 5)}
    driver.finish_step(output, token_id=1)
    driver.drain()


def test_preempted_request_finds_its_blocks_again_if_they_were_not_taken() -> None:
    driver = make_driver(num_blocks=10)
    driver.add(make_request("old", (1,) * 3, sampling_params=tokens(4)))
    driver.add(make_request("young", (2,) * 4, sampling_params=tokens(4)))
    run(driver, 3)
    assert "young" in {r.request_id for r in driver.scheduler.waiting}
    run(driver)
    (windows,) = run(driver)
    start, end = windows["young"]
    assert start > 0
    assert end == 6
    # What it reports is what it found when it came, not what it had computed itself.
    assert driver.scheduler.requests["young"].num_cached_tokens == 0
    driver.drain()


def test_preempted_request_does_not_start_again_in_the_same_step() -> None:
    driver = make_driver(num_blocks=10, max_num_batched_tokens=3, enable_prefix_caching=False)
    driver.add(make_request("old", (1,) * 5, sampling_params=tokens(4)))
    driver.add(make_request("young", (2,) * 3, sampling_params=tokens(2)))
    assert run(driver, 3)[-1] == {"old": (5, 6), "young": (1, 3)}
    output = driver.schedule()  # two tokens and two blocks are left, which it could take
    assert output.stopped_request_ids == ("young",)
    assert output.started == ()
    driver.finish_step(output, token_id=1)


def test_last_in_the_order_is_preempted_first() -> None:
    driver = make_driver(num_blocks=10, policy="priority")
    for name, priority in [("late", 2), ("early", 0), ("middle", 1)]:
        driver.add(make_request(name, (1,), cache_salt=name, priority=priority))
    run(driver, 3)
    output = driver.schedule()
    assert output.stopped_request_ids == ("late",)
    assert set(get_windows(output)) == {"early", "middle"}
    driver.finish_step(output, token_id=1)
    driver.drain()


def test_abort_frees_everything_and_is_reported_once() -> None:
    driver = make_driver()
    driver.add(make_request("r", "three", (1,)))
    run(driver)
    output = driver.scheduler.abort_request("r")
    assert output is not None
    assert output.finish_reason is FinishReason.ABORT
    assert driver.scheduler.abort_request("r") is None
    assert driver.kv_cache.statistics()[0].num_used == 0
    assert driver.scheduler.schedule().stopped_request_ids == ("r",)


def test_abort_of_a_waiting_request_is_not_sent_to_the_worker() -> None:
    driver = make_driver()
    driver.add(make_request("r", (1,)))
    driver.abort("r")
    assert driver.scheduler.schedule().stopped_request_ids == ()


def test_new_request_may_take_the_id_of_one_that_was_aborted_during_the_step() -> None:
    driver = make_driver()
    driver.add(make_request("r", (1,) * 3, sampling_params=tokens(3)))
    output = driver.schedule()
    driver.abort("r")
    driver.add(make_request("r", (2,) * 2, sampling_params=tokens(3)))
    driver.finish_step(output, token_id=1)
    assert driver.scheduler.requests["r"].num_computed_tokens == 0
    output = driver.schedule()
    assert output.stopped_request_ids == ("r",)
    assert get_windows(output) == {"r": (0, 2)}
    driver.finish_step(output, token_id=1)
    driver.drain()


def test_id_in_use_is_refused() -> None:
    driver = make_driver()
    driver.scheduler.add_request(make_request("r", (1,)))
    with pytest.raises(RequestError, match="request id 'r' is in use"):
        driver.scheduler.add_request(make_request("r", (1,)))


def test_request_that_can_never_fit_is_refused() -> None:
    driver = make_driver(num_blocks=10)
    fits = make_request("fits", (1,) * 5, sampling_params=tokens(4))
    driver.scheduler.add_request(fits)
    with pytest.raises(RequestError, match="may grow to 10 tokens, more than the whole KV cache"):
        driver.scheduler.add_request(make_request("r", (1,) * 5, sampling_params=tokens(5)))


def test_window_makes_room_for_long_requests() -> None:
    driver = make_driver(num_blocks=12, windows=(3,), max_num_batched_tokens=8)
    assert driver.add(make_request("r", (1,) * 30, sampling_params=tokens(20)))
    driver.drain()


def test_end_of_sequence_ends_a_request() -> None:
    driver = make_driver()
    driver.add(make_request("r", (1,) * 2))
    output = driver.schedule()
    result = ModelRunnerOutput(token_ids={"r": (EOS,)}, logprobs={}, failed_encodes={})
    (news,) = driver.scheduler.update_from_output(output, result)
    assert news.finish_reason is FinishReason.STOP
    assert news.new_token_ids == (EOS,)
    assert news.stop_token_id is None


def test_broken_step_ends_its_requests_and_no_others() -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add(make_request("running", (1,) * 2))
    driver.add(make_request("waiting", (1,) * 2))
    output = driver.schedule()
    (news,) = driver.scheduler.fail_step(output, "out of memory")
    assert news.request_id == "running"
    assert news.finish_reason is FinishReason.ERROR
    assert news.error == ErrorRecord(kind="FailedRequestError", message="out of memory")
    assert get_windows(driver.scheduler.schedule()) == {"waiting": (0, 2)}


def test_after_a_broken_step_the_worker_gets_the_drops_again() -> None:
    driver = make_driver(encoder_cache_size=3)
    driver.add(make_request("a", "three", sampling_params=tokens(1)))
    run(driver)
    driver.add(make_request("b", "two", sampling_params=tokens(1)))
    output = driver.schedule()
    assert output.stopped_request_ids == ("a",)
    assert output.freed_encoder_keys == ("three",)
    driver.fail_step(output, has_run=False)
    again = driver.scheduler.schedule()
    assert again.stopped_request_ids == ("a", "b")
    assert again.freed_encoder_keys == ("three", "two")


def test_a_request_that_the_worker_left_out_ends_without_others() -> None:
    driver = make_driver()
    for name in "ab":
        driver.add(make_request(name, (1,) * 2, cache_salt=name, sampling_params=tokens(1)))
    output = driver.schedule()
    result = ModelRunnerOutput(
        token_ids={"b": (1,)},
        logprobs={},
        failed_encodes={},
        failed_requests={"a": RequestError("not finite")},
    )
    news = {n.request_id: n for n in driver.scheduler.update_from_output(output, result)}
    assert news["a"].finish_reason is FinishReason.ERROR
    assert news["a"].error == ErrorRecord(message="not finite")
    assert news["b"].finish_reason is FinishReason.LENGTH
    assert driver.kv_cache.statistics()[0].num_cached == 2


def test_a_request_does_not_inherit_the_waiting_time_of_an_earlier_one_with_its_id() -> None:
    driver = make_driver(num_blocks=20, max_num_batched_tokens=30)
    driver.add(make_request("reader", (1,) * 8, sampling_params=tokens(9)))
    driver.step()
    driver.add(make_request("r", (2,) * 15, sampling_params=tokens(1)))
    assert "r" not in run(driver)[0]
    driver.abort("r")
    driver.add(make_request("r", (2,) * 2, sampling_params=tokens(1)))
    assert "r" in run(driver)[0]


def test_request_that_becomes_long_starts_again_with_nothing_of_what_it_had() -> None:
    driver = make_driver(long_after=5, max_num_batched_tokens=100)
    driver.add(make_request("r", (1,) * 4, sampling_params=tokens(4)))
    assert run(driver, 2) == [{"r": (0, 4)}, {"r": (4, 5)}]

    output = driver.schedule()
    assert output.stopped_request_ids == ("r",)
    (started,) = output.started
    assert (started.is_long, started.output_token_ids) == (True, (1, 1))
    assert get_windows(output) == {"r": (0, 6)}
    driver.finish_step(output, token_id=1)
    assert run(driver) == [{"r": (6, 7)}]
    assert not driver.open
    assert driver.scheduler.counters.num_preemptions == 0


def test_long_and_short_requests_share_no_blocks() -> None:
    driver = make_driver(long_after=5, max_num_batched_tokens=100)
    for name, length, expected in [
        ("short", 5, (0, 5)),
        ("long", 9, (0, 9)),
        ("short again", 4, (3, 4)),
        ("long again", 8, (7, 8)),
    ]:
        driver.add(make_request(name, (1,) * length, sampling_params=tokens(1)))
        assert run(driver) == [{name: expected}]


def test_request_that_ends_at_the_border_does_not_start_again() -> None:
    driver = make_driver(long_after=5)
    driver.add(make_request("r", (1,) * 4, sampling_params=tokens(2)))
    run(driver, 2)
    assert not driver.open
    driver.drain()
