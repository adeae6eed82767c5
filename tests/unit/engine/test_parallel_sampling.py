"""One request for n completions becomes n requests of the core, the first ahead of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sensorium.engine.outputs.completions import (
    ParallelSampling,
    get_child_ids,
    make_children,
)
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from sensorium.types.sampling import SamplingParams


def make_request(request_id: str = "r", **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=(1, 2),
        sampling_params=SamplingParams(**{"seed": 7, **params}),
        cache_salt="salt",
    )


def test_a_request_for_one_completion_is_its_own_only_child() -> None:
    request = make_request()
    assert make_children(request) == (request,)
    assert get_child_ids(request) == ("r",)


def test_children_differ_only_in_their_ids_and_seeds() -> None:
    request = make_request(n=4, temperature=0.5)
    children = make_children(request)
    assert tuple(child.request_id for child in children) == get_child_ids(request)
    seeds = [child.sampling_params.seed for child in children]
    assert seeds[0] == 7
    assert len(set(seeds)) == len(set(get_child_ids(request))) == 4
    for child in children:
        params = replace(child.sampling_params, n=4, seed=7)
        assert child.group == "r"
        same = replace(child, request_id="r", completion_index=0, group=None)
        assert replace(same, sampling_params=params) == request
    assert [child.completion_index for child in children] == [0, 1, 2, 3]


def test_seeds_of_children_repeat_and_do_not_meet_those_of_other_seeds() -> None:
    def get_seeds(seed: int) -> list[int | None]:
        return [c.sampling_params.seed for c in make_children(make_request(n=8, seed=seed))]

    assert get_seeds(5) == get_seeds(5)
    assert len({seed for start in range(50) for seed in get_seeds(start)}) == 400
    # Fewer completions are the first of more.
    fewer = make_children(make_request(n=2, seed=5))
    assert [child.sampling_params.seed for child in fewer] == get_seeds(5)[:2]


def test_only_the_first_child_scores_the_prompt() -> None:
    children = make_children(make_request(n=3, prompt_logprobs=2))
    assert [child.sampling_params.prompt_logprobs for child in children] == [2, None, None]


def give(request_id: str, *tokens: int, reason: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=request_id, new_token_ids=tokens, finish_reason=reason)


MEDIA: Any = ("media",)
RELEASED: list[Any] = []


def make_parallel_sampling() -> ParallelSampling:
    RELEASED.clear()
    return ParallelSampling(RELEASED.append)


def take_ids(sampling: ParallelSampling, *outputs: EngineCoreOutput) -> list[str]:
    groups = sampling.take_ready(outputs)
    return [child.request_id for group in groups for child in group.children]


def test_other_completions_start_once_with_the_first_token_of_the_first() -> None:
    sampling = make_parallel_sampling()
    first, has_rest = sampling.add(make_request(n=3), MEDIA)
    assert (first.request_id, has_rest) == ("r#0", True)
    assert take_ids(sampling, give("r#0"), give("other", 5)) == []  # no token yet
    (ready,) = sampling.take_ready([give("r#0", 5, reason=FinishReason.LENGTH)])
    assert ready.request_id == "r"
    assert [child.request_id for child in ready.children] == ["r#1", "r#2"]
    assert ready.items is MEDIA
    assert RELEASED == []  # the caller's now
    assert take_ids(sampling, give("r#0", 6)) == []
    assert len(sampling) == 0


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_other_completions_of_one_that_failed_never_start(reason: FinishReason) -> None:
    sampling = make_parallel_sampling()
    sampling.add(make_request(n=3), MEDIA)
    assert take_ids(sampling, give("r#0", reason=reason)) == []
    assert len(sampling) == 0
    assert RELEASED == [MEDIA]


def test_dropped_completions_never_start() -> None:
    sampling = make_parallel_sampling()
    sampling.add(make_request(n=2), MEDIA)
    sampling.drop(("r#0", "unknown"))
    assert RELEASED == [MEDIA]
    assert take_ids(sampling, give("r#0", 5)) == []


def test_a_request_for_one_completion_keeps_no_state() -> None:
    sampling = make_parallel_sampling()
    first, has_rest = sampling.add(make_request(), MEDIA)
    assert (first.request_id, has_rest) == ("r", False)
    assert len(sampling) == 0
