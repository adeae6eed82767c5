"""A request that wants its prompt's log-probabilities computes every prompt token, once."""

from __future__ import annotations

from dataclasses import replace

from tests.property.strategies import make_request

from .building import make_driver, run, tokens

SCORED = replace(tokens(4), prompt_logprobs=1)


def test_scored_prompt_tokens_are_not_taken_from_the_prefix_cache() -> None:
    driver = make_driver()
    driver.add(make_request("first", (1,) * 6, sampling_params=tokens(1)))
    run(driver)
    driver.add(make_request("plain", (1,) * 6, sampling_params=tokens(1)))
    driver.add(make_request("scored", (1,) * 6, sampling_params=SCORED))
    windows = run(driver)[0]
    assert windows == {"plain": (5, 6), "scored": (0, 6)}


def test_blocks_of_a_scored_prompt_are_cached_for_others() -> None:
    driver = make_driver()
    driver.add(make_request("scored", (1,) * 6, sampling_params=SCORED))
    run(driver)
    driver.add(make_request("plain", (1,) * 6, sampling_params=tokens(1)))
    assert run(driver)[0]["plain"] == (5, 6)


def test_scored_chunks_are_reported_as_they_are_computed() -> None:
    driver = make_driver(max_num_batched_tokens=4)
    driver.add(make_request("r", (1,) * 10, sampling_params=SCORED))
    counts = []
    for _ in range(3):
        run(driver)
        counts.append(len(driver.scored["r"]))
    assert counts == [4, 8, 9]


def test_after_a_preemption_scoring_continues_where_it_was() -> None:
    driver = make_driver(num_blocks=17, max_num_batched_tokens=6)
    driver.add(make_request("first", (1,) * 2, sampling_params=tokens(14)))
    driver.add(make_request("scored", (2,) * 12, sampling_params=SCORED))
    run(driver, 4)
    assert driver.scored["scored"] == list(range(1, 12))
    request = driver.scheduler.requests["scored"]
    while request.num_preemptions == 0:
        run(driver)
    driver.drain()
    assert request.num_output_tokens == 4
    assert driver.scored["scored"] == list(range(1, 12))


def test_one_token_has_nothing_to_score() -> None:
    driver = make_driver()
    driver.add(make_request("r", (1,), sampling_params=SCORED))
    driver.drain()
    assert driver.scored["r"] == []
