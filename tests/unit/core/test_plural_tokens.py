"""A step may give a request several tokens, and tensors by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sensorium.types.errors import InvariantError
from sensorium.types.request import (
    EngineCoreOutput,
    FinishReason,
    TensorResult,
    TokenLogprobs,
)
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import ModelRunnerOutput
from tests.property.scheduler_driver import SchedulerDriver
from tests.property.strategies import EOS, make_request

from .building import get_windows, make_driver, tokens


def start(params: SamplingParams) -> SchedulerDriver:
    driver = make_driver()
    driver.scheduler.add_request(make_request("r", (1, 1, 1), sampling_params=params))
    return driver


def step(driver: SchedulerDriver, *chosen: int, **results: object) -> EngineCoreOutput:
    plan = driver.scheduler.schedule()
    result = ModelRunnerOutput(token_ids={"r": chosen}, logprobs={}, failed_encodes={})
    result = replace(result, **results)  # type: ignore[arg-type]
    (output,) = driver.scheduler.update_from_output(plan, result)
    return output


def test_all_tokens_are_returned_and_the_next_step_computes_them() -> None:
    driver = start(tokens(9))
    entries = tuple(
        TokenLogprobs(logprob=-float(n), rank=1, top_token_ids=(), top_logprobs=())
        for n in range(3)
    )
    output = step(driver, 5, 6, 4, logprobs={"r": entries})
    assert output.new_token_ids == (5, 6, 4)
    assert output.logprobs == entries
    assert output.finish_reason is None
    plan = driver.scheduler.schedule()
    assert get_windows(plan) == {"r": (3, 6)}
    assert [entry.num_sampled for entry in plan.scheduled] == [1]
    assert driver.scheduler.counters.num_sampled_tokens == 3


@pytest.mark.parametrize(
    ("params", "reason", "num_taken"),
    [
        (SamplingParams(), FinishReason.STOP, 2),
        (SamplingParams(stop_token_ids=(5,)), FinishReason.STOP, 1),
        (SamplingParams(max_tokens=3, ignore_eos=True), FinishReason.LENGTH, 3),
        (SamplingParams(min_tokens=3), None, 4),
    ],
)
def test_tokens_after_the_one_that_ends_the_request_are_dropped(
    params: SamplingParams, reason: FinishReason | None, num_taken: int
) -> None:
    driver = start(params)
    output = step(driver, 5, EOS, 6, 6)
    assert output.new_token_ids == (5, EOS, 6, 6)[:num_taken]
    assert output.finish_reason is reason
    assert ("r" in driver.scheduler.requests) is (reason is None)


def test_a_complete_grammar_ends_the_request_after_the_last_of_its_tokens() -> None:
    output = step(start(tokens(9)), 5, 6, completed_request_ids=frozenset({"r"}))
    assert (output.new_token_ids, output.finish_reason) == ((5, 6), FinishReason.STOP)


def test_several_tokens_while_another_step_chooses_one_are_a_fault() -> None:
    scheduler = start(tokens(9)).scheduler
    first = scheduler.schedule()
    assert scheduler.schedule().scheduled  # planned before the first token is known
    result = ModelRunnerOutput(token_ids={"r": (5, 6)}, logprobs={}, failed_encodes={})
    with pytest.raises(InvariantError, match="another step also chooses"):
        scheduler.update_from_output(first, result)


def test_tensors_are_passed_on_by_name() -> None:
    results = {"scores": TensorResult(shape=(2,), values=b"12345678")}
    output = step(start(tokens(9)), 5, results={"r": results, "other": {}})
    assert output.results == results
    assert not step(start(tokens(9)), 5).results
