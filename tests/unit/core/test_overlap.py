"""Steps that are planned while the one before them is under way."""

from __future__ import annotations

from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import ModelRunnerOutput, SchedulerOutput
from tests.property.strategies import EOS, make_request

from .building import get_windows, make_driver, tokens


def answer(output: SchedulerOutput, token_id: int = 1) -> ModelRunnerOutput:
    sampled = {s.request_id: (token_id,) for s in output.scheduled if s.num_sampled}
    return ModelRunnerOutput(token_ids=sampled, logprobs={}, failed_encodes={})


def test_a_request_decodes_before_its_last_token_was_read() -> None:
    scheduler = make_driver().scheduler
    scheduler.add_request(make_request("r", (1, 1, 1), sampling_params=tokens(4)))
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert [get_windows(plan) for plan in plans] == [{"r": (0, 3)}, {"r": (3, 4)}]
    assert all(entry.num_sampled for plan in plans for entry in plan.scheduled)
    (first,) = scheduler.update_from_output(plans[0], answer(plans[0], 5))
    plans.append(scheduler.schedule())
    (second,) = scheduler.update_from_output(plans[1], answer(plans[1], 6))
    assert get_windows(plans[2]) == {"r": (4, 5)}
    assert (first.new_token_ids, second.new_token_ids) == ((5,), (6,))
    assert scheduler.requests["r"].token_ids == [1, 1, 1, 5, 6]


def test_a_token_after_the_end_is_dropped_and_leaves_nothing() -> None:
    driver = make_driver(block_size=2)
    scheduler, kv_cache = driver.scheduler, driver.kv_cache
    scheduler.add_request(make_request("r", (1, 1, 1), sampling_params=SamplingParams()))
    first, late = scheduler.schedule(), scheduler.schedule()
    (end,) = scheduler.update_from_output(first, answer(first, EOS))
    assert (end.new_token_ids, end.finish_reason) == ((EOS,), FinishReason.STOP)
    assert scheduler.update_from_output(late, answer(late, 7)) == []
    assert not scheduler.has_requests
    assert scheduler.counters.num_sampled_tokens == 1
    assert kv_cache.statistics()[0].num_used == 0
    # Only the block that the prompt has filled can be found.
    scheduler.add_request(make_request("again", (1, 1, 1, EOS, 7), sampling_params=tokens(1)))
    assert get_windows(scheduler.schedule()) == {"again": (2, 5)}


def test_no_step_is_planned_after_the_last_token() -> None:
    scheduler = make_driver().scheduler
    scheduler.add_request(make_request("r", (1, 1), sampling_params=tokens(2)))
    plans = [scheduler.schedule(), scheduler.schedule(), scheduler.schedule()]
    assert [get_windows(plan) for plan in plans] == [{"r": (0, 2)}, {"r": (2, 3)}, {}]


def test_a_request_that_needs_its_tokens_read_runs_every_second_step() -> None:
    scheduler = make_driver().scheduler
    penalised = SamplingParams(max_tokens=9, ignore_eos=True, presence_penalty=0.5)
    scheduler.add_request(make_request("penalised", (1,), sampling_params=penalised))
    scheduler.add_request(make_request("free", (2,), sampling_params=tokens(9)))
    last, took_part = scheduler.schedule(), []
    for _ in range(4):
        plan = scheduler.schedule()
        scheduler.update_from_output(last, answer(last))
        took_part.append(sorted(get_windows(plan)))
        last = plan
    assert took_part == [["free"], ["free", "penalised"]] * 2


def test_a_request_that_comes_back_under_its_name_gets_nothing_of_the_old_one() -> None:
    scheduler = make_driver().scheduler
    scheduler.add_request(make_request("r", (1, 1), sampling_params=tokens(4)))
    old = scheduler.schedule()
    scheduler.abort_request("r")
    scheduler.add_request(make_request("r", (2, 2, 2), sampling_params=tokens(4)))
    new = scheduler.schedule()
    assert new.stopped_request_ids == ("r",)
    assert scheduler.update_from_output(old, answer(old, 5)) == []
    (output,) = scheduler.update_from_output(new, answer(new, 6))
    assert output.new_token_ids == (6,)
    assert scheduler.requests["r"].token_ids == [2, 2, 2, 6]


def test_a_request_that_is_preempted_still_takes_its_token() -> None:
    scheduler = make_driver(num_blocks=10, max_num_batched_tokens=16).scheduler
    for name in ("first", "second"):
        scheduler.add_request(make_request(name, (1, 1, 1), sampling_params=tokens(6)))
    plans = [scheduler.schedule()]
    while not scheduler.counters.num_preemptions:
        plans.append(scheduler.schedule())
        last = scheduler.update_from_output(plans[-2], answer(plans[-2]))
    assert "second" not in get_windows(plans[-1])
    assert [output.request_id for output in last] == ["first", "second"]
    assert scheduler.requests["second"].num_computed_tokens == 0
    plan = scheduler.schedule()
    scheduler.update_from_output(plans[-1], answer(plans[-1]))
    assert plan.started == () or plan.started[0].output_token_ids == (1,) * len(last)


def test_requests_that_share_an_item_of_a_failed_step_fail_with_it() -> None:
    scheduler = make_driver(max_num_batched_tokens=4).scheduler
    scheduler.add_request(make_request("a", "three", (1,), sampling_params=tokens(2)))
    first = scheduler.schedule()
    scheduler.add_request(make_request("b", "three", (2,), sampling_params=tokens(2)))
    scheduler.add_request(make_request("c", (3,), sampling_params=tokens(2)))
    second = scheduler.schedule()
    assert sorted(get_windows(second)) == ["a", "b"]
    ends = {output.request_id for output in scheduler.fail_step(first, "it broke")}
    assert ends == {"a", "b"}
    assert scheduler.update_from_output(second, answer(second)) == []
    third = scheduler.schedule()
    assert third.freed_encoder_keys == ("three",)
    assert sorted(third.stopped_request_ids) == ["a", "b"]
    assert get_windows(third) == {"c": (0, 1)}
