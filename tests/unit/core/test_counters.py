"""What a scheduler counts, where the engine's metrics don't show it."""

from __future__ import annotations

import pytest

from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import ModelRunnerOutput
from tests.property.strategies import make_request

from .building import make_driver, run, tokens


@pytest.mark.parametrize(
    ("changes", "num_queries"),
    [({}, 6), ({"is_encoder_decoder": True}, 0), ({"enable_prefix_caching": False}, 0)],
)
def test_only_what_is_looked_up_is_a_query(changes: dict[str, bool], num_queries: int) -> None:
    driver = make_driver(**changes)  # type: ignore[arg-type]
    assert driver.add(make_request("a", (1,) * 6, sampling_params=tokens(2)))
    run(driver)
    assert driver.scheduler.counters.num_prefix_queries == num_queries


def test_outputs_that_a_stop_string_may_end_carry_the_times_of_a_last_one() -> None:
    scheduler = make_driver().scheduler
    params = {"plain": tokens(3), "stop": SamplingParams(max_tokens=3, stop="x", ignore_eos=True)}
    for name, each in params.items():
        scheduler.add_request(make_request(name, (1, 2), sampling_params=each))
    result = ModelRunnerOutput(
        token_ids=dict.fromkeys(params, (1,)), logprobs={}, failed_encodes={}
    )
    outputs = scheduler.update_from_output(scheduler.schedule(), result)
    news = {output.request_id: output for output in outputs}
    assert news["plain"].times is None
    times = news["stop"].times
    assert times is not None
    assert times.first_token is not None
    assert times.finished is not None
