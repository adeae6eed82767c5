"""Encoder inputs and unsplittable spans, by example."""

from __future__ import annotations

from sensorium.types.errors import ErrorRecord
from sensorium.types.request import FinishReason
from sensorium.types.scheduling import ModelRunnerOutput, SchedulerOutput
from tests.property.strategies import make_request

from .building import get_windows, make_driver, run, tokens


def get_encoded(output: SchedulerOutput) -> dict[str, list[str]]:
    """Return the keys that each request encodes in the step."""
    return {
        s.request_id: [encoder_input.key for encoder_input in s.encoder_inputs]
        for s in output.scheduled
        if s.encoder_inputs
    }


def test_item_is_encoded_when_its_first_embedding_is_needed() -> None:
    driver = make_driver(max_num_batched_tokens=4)
    driver.add(make_request("r", (1,) * 3, "framed", (1,)))
    first = driver.schedule()  # "framed" begins at 3, its embeddings at 4
    assert get_encoded(first) == {}
    driver.finish_step(first, token_id=1)
    second = driver.schedule()
    assert get_encoded(second) == {"r": ["framed"]}
    driver.finish_step(second, token_id=1)


def test_item_is_held_until_its_last_position_is_computed() -> None:
    driver = make_driver(max_num_batched_tokens=3)
    driver.add(make_request("r", "six", (1,) * 3))
    run(driver)
    request = driver.scheduler.requests["r"]
    assert driver.encoder_cache.has_reference(request, 0)
    run(driver)
    assert not driver.encoder_cache.has_reference(request, 0)
    assert driver.encoder_cache.is_evictable("six")


def test_same_image_twice_is_encoded_once_and_held_twice() -> None:
    driver = make_driver(max_num_batched_tokens=5)
    driver.add(make_request("r", "three", "three", (1,)))
    output = driver.schedule()
    assert get_encoded(output) == {"r": ["three"]}
    driver.finish_step(output, token_id=1)
    request = driver.scheduler.requests["r"]
    assert driver.encoder_cache.get_cached_input_ids(request) == {1}
    output = driver.schedule()
    assert get_encoded(output) == {}
    driver.finish_step(output, token_id=1)
    assert len(driver.scheduler.requests["r"].encoder_hits) == 1


def test_two_requests_of_one_step_encode_an_item_once() -> None:
    driver = make_driver(max_num_batched_tokens=20)
    for name in "ab":
        driver.add(make_request(name, (1,), "three", (1,), sampling_params=tokens(1)))
    output = driver.schedule()
    assert get_encoded(output) == {"a": ["three"]}
    assert set(get_windows(output)) == {"a", "b"}
    driver.finish_step(output, token_id=1)


def test_cached_prefix_needs_no_encoder() -> None:
    driver = make_driver(max_num_batched_tokens=20)
    driver.add(make_request("a", "three", (1,), sampling_params=tokens(1)))
    run(driver)
    driver.encoder_cache.clear_cache()
    driver.add(make_request("b", "three", (1,) * 2, sampling_params=tokens(1)))
    output = driver.schedule()
    assert get_windows(output) == {"b": (4, 5)}
    assert get_encoded(output) == {}


def test_prefix_that_ends_inside_an_item_needs_its_encoder() -> None:
    driver = make_driver(max_num_batched_tokens=20, block_size=2)
    driver.add(make_request("a", "three", (1,), sampling_params=tokens(1)))
    run(driver)
    driver.encoder_cache.clear_cache()
    driver.add(make_request("b", "three", (2,) * 2, sampling_params=tokens(1)))
    output = driver.schedule()
    assert get_windows(output) == {"b": (2, 5)}
    assert get_encoded(output) == {"b": ["three"]}


def test_window_is_cut_before_an_item_that_the_compute_budget_does_not_hold() -> None:
    driver = make_driver(max_num_encoder_embeds=4, max_num_batched_tokens=20)
    driver.add(make_request("r", "three", (1,), "two", (1,), sampling_params=tokens(1)))
    assert run(driver, 2) == [{"r": (0, 4)}, {"r": (4, 7)}]


def test_item_larger_than_the_compute_budget_is_encoded_when_it_is_the_first() -> None:
    driver = make_driver(max_num_encoder_embeds=1, max_num_batched_tokens=20)
    driver.add(make_request("r", "three", "six", sampling_params=tokens(1)))
    assert run(driver, 2) == [{"r": (0, 3)}, {"r": (3, 9)}]


def test_items_that_fill_the_cache_follow_each_other() -> None:
    driver = make_driver(encoder_cache_size=6, max_num_batched_tokens=20)
    driver.add(make_request("r", "six", "rows", "six", sampling_params=tokens(1)))
    assert run(driver, 3) == [{"r": (0, 6)}, {"r": (6, 11)}, {"r": (11, 17)}]


def test_a_shared_entry_is_not_evicted_for_an_item_of_the_same_step() -> None:
    """The second "nine" is still cached, but there is no room for it and "framed" together."""
    driver = make_driver(encoder_cache_size=9, max_num_batched_tokens=5)
    driver.add(make_request("r", "nine", "framed", "nine", sampling_params=tokens(1)))
    assert run(driver, 5) == [
        {"r": (0, 5)},
        {"r": (5, 10)},
        {"r": (10, 13)},
        {"r": (13, 18)},
        {"r": (18, 22)},
    ]


def test_a_request_that_waits_for_encoder_space_is_not_overtaken() -> None:
    """Each step of the later ones would end inside an item, for ever."""
    driver = make_driver(encoder_cache_size=9, max_num_batched_tokens=7)
    params = tokens(1)
    driver.add(make_request("large", (1,) * 3, "nine", sampling_params=params))
    # Its first step leaves four tokens of the budget to the next one.
    for index in range(6):
        name = f"small {index}"
        driver.add(make_request(name, "six", (1,), cache_salt=name, sampling_params=params))
    driver.add(make_request("rival", "two"))
    windows = run(driver, 4)
    assert "large" in windows[0]
    assert "large" not in driver.open


def test_a_failed_item_ends_only_the_requests_that_need_it() -> None:
    driver = make_driver(max_num_batched_tokens=30)
    for name, item in [("a", "three"), ("b", "three"), ("c", "two")]:
        driver.add(make_request(name, item, (1,), cache_salt=None, sampling_params=tokens(1)))
    output = driver.schedule()
    result = ModelRunnerOutput(
        token_ids={"c": (1,)}, logprobs={}, failed_encodes={"three": "odd size"}
    )
    news = {n.request_id: n for n in driver.scheduler.update_from_output(output, result)}
    assert {name: n.finish_reason for name, n in news.items()} == {
        "a": FinishReason.ERROR,
        "b": FinishReason.ERROR,
        "c": FinishReason.LENGTH,
    }
    assert news["a"].error == ErrorRecord(message="odd size")
    assert not driver.encoder_cache.is_computed("three")
    assert "three" not in driver.encoder_cache


def test_an_item_without_requests_after_its_step_stays_as_evictable() -> None:
    driver = make_driver()
    driver.add(make_request("r", "three", (1,)))
    output = driver.schedule()
    driver.abort("r")
    assert "three" in driver.encoder_cache
    assert not driver.encoder_cache.is_computed("three")
    driver.finish_step(output, token_id=1)
    assert driver.encoder_cache.is_evictable("three")


def test_answers_continue_between_two_items_beyond_the_encoder_budget() -> None:
    driver = make_driver(max_num_encoder_embeds=3, max_num_batched_tokens=40)
    driver.add(make_request("answer", (1,), sampling_params=tokens(12)))
    run(driver)
    for name, item in (("a", "six"), ("b", "nine")):
        driver.add(make_request(name, (1,), item, (1,), sampling_params=tokens(1)))
    encoded, answered = [], []
    for _ in range(4):
        output = driver.schedule()
        encoded.append(get_encoded(output))
        answered.append("answer" in get_windows(output))
        driver.finish_step(output, token_id=1)
    # Six embeddings are twice the budget: one step makes up for them.
    assert encoded == [{"a": ["six"]}, {}, {"b": ["nine"]}, {}]
    assert all(answered)


def test_encoders_do_not_rest_while_there_is_nothing_else_to_do() -> None:
    driver = make_driver(max_num_encoder_embeds=3, max_num_batched_tokens=40)
    for name, item in (("a", "six"), ("b", "nine")):
        driver.add(make_request(name, item, sampling_params=tokens(1)))
    encoded = []
    for _ in range(2):
        output = driver.schedule()
        encoded.append(get_encoded(output))
        driver.finish_step(output, token_id=1)
    assert encoded == [{"a": ["six"]}, {"b": ["nine"]}]


def test_encoder_decoder_encodes_all_audio_in_its_first_step() -> None:
    driver = make_driver(
        is_encoder_decoder=True, max_num_batched_tokens=2, max_num_encoder_embeds=1
    )
    request = make_request("r", "six", "nine", (1,) * 4, is_encoder_decoder=True)
    driver.add(request)
    output = driver.schedule()
    assert get_windows(output) == {"r": (0, 2)}
    assert get_encoded(output) == {"r": ["six", "nine"]}
    driver.finish_step(output, token_id=1)
    assert driver.encoder_cache.statistics().num_references == 0
    output = driver.schedule()
    assert get_encoded(output) == {}
    driver.finish_step(output, token_id=1)


def test_encoder_decoder_finds_the_keys_and_values_of_known_audio() -> None:
    driver = make_driver(is_encoder_decoder=True)

    def start(name: str, item: str, cache_salt: str | None = None) -> tuple[bool, list[str]]:
        driver.add(
            make_request(
                name,
                item,
                (1,) * 4,
                is_encoder_decoder=True,
                cache_salt=cache_salt,
                sampling_params=tokens(1),
            )
        )
        output = driver.schedule()
        driver.finish_step(output, token_id=1)
        (started,) = output.started
        return started.has_media, get_encoded(output).get(name, [])

    assert start("a", "six") == (False, ["six"])
    assert start("b", "six") == (True, [])
    assert start("c", "nine") == (False, ["nine"])
    assert start("d", "six", "salt") == (False, ["six/None/'salt'"])
    statistics = driver.encoder_cache.statistics()
    assert (statistics.num_queries, statistics.num_hits) == (4, 1)
    driver.kv_cache.clear_cache()
    assert start("e", "six") == (False, ["six"])


def test_encoder_decoder_keeps_its_audio_while_the_only_token_of_its_prompt_is_late() -> None:
    """The worker stores the audio in every step that begins at 0, so it has to be there."""
    driver = make_driver(is_encoder_decoder=True, is_ahead=False)
    driver.add(make_request("r", "six", (1,), is_encoder_decoder=True))
    late = ModelRunnerOutput(
        token_ids={}, logprobs={}, failed_encodes={}, late_request_ids=frozenset({"r"})
    )
    scheduler = driver.scheduler
    for encoded in (["six"], []):
        output = scheduler.schedule()
        assert get_windows(output) == {"r": (0, 1)}
        assert get_encoded(output).get("r", []) == encoded
        scheduler.update_from_output(output, late)
        assert driver.encoder_cache.has_reference(scheduler.requests["r"], 0)
    result = ModelRunnerOutput(token_ids={"r": (1,)}, logprobs={}, failed_encodes={})
    scheduler.update_from_output(scheduler.schedule(), result)
    assert driver.encoder_cache.statistics().num_references == 0
    assert scheduler.requests["r"].has_media


def test_encoder_decoder_starts_at_zero_although_its_prompt_is_cached() -> None:
    driver = make_driver(is_encoder_decoder=True)
    for name in "ab":
        request = make_request(
            name, "six", (1,) * 4, is_encoder_decoder=True, sampling_params=tokens(1)
        )
        driver.add(request)
        assert run(driver) == [{name: (0, 4)}]


def test_span_is_not_split() -> None:
    driver = make_driver(bidirectional_modalities=frozenset({"image"}), max_num_batched_tokens=8)
    driver.add(make_request("r", (1,) * 4, "six", (1,), sampling_params=tokens(1)))
    assert run(driver, 2) == [{"r": (0, 4)}, {"r": (4, 11)}]


def test_a_span_larger_than_the_budget_has_its_own_step() -> None:
    driver = make_driver(bidirectional_modalities=frozenset({"image"}), max_num_batched_tokens=4)
    driver.add(make_request("large", "nine", (1,), sampling_params=tokens(1)))
    driver.add(make_request("other", (1,) * 2, sampling_params=tokens(1)))
    assert run(driver, 2) == [{"large": (0, 9)}, {"large": (9, 10), "other": (0, 2)}]


def test_only_the_embeddings_of_an_item_must_run_together() -> None:
    driver = make_driver(bidirectional_modalities=frozenset({"image"}), max_num_batched_tokens=3)
    driver.add(make_request("r", "rows", (1,), sampling_params=tokens(1)))
    assert run(driver, 2) == [{"r": (0, 3)}, {"r": (3, 6)}]


def test_items_run_whole_where_chunking_is_disabled() -> None:
    driver = make_driver(disable_chunked_mm_input=True, max_num_batched_tokens=3)
    driver.add(make_request("r", "rows", (1,), sampling_params=tokens(1)))
    assert run(driver, 2) == [{"r": (0, 5)}, {"r": (5, 6)}]


def test_the_next_step_reserves_tokens_for_a_span_that_found_too_few() -> None:
    driver = make_driver(bidirectional_modalities=frozenset({"image"}), max_num_batched_tokens=6)
    driver.add(make_request("reader", (1,) * 2, sampling_params=tokens(20)))
    run(driver)
    driver.add(make_request("viewer", "six", sampling_params=tokens(2)))
    assert run(driver, 3) == [
        {"reader": (2, 3)},
        {"viewer": (0, 6)},
        {"reader": (3, 4), "viewer": (6, 7)},
    ]


def test_smaller_span_leaves_the_rest_to_those_ahead_of_it() -> None:
    driver = make_driver(bidirectional_modalities=frozenset({"image"}), max_num_batched_tokens=4)
    driver.add(make_request("a", (1,), sampling_params=tokens(20)))
    driver.add(make_request("b", (2,), sampling_params=tokens(20)))
    run(driver)
    driver.add(make_request("viewer", "three", sampling_params=tokens(2)))
    assert run(driver, 3) == [
        {"a": (1, 2), "b": (1, 2)},
        {"a": (2, 3), "viewer": (0, 3)},
        {"a": (3, 4), "b": (2, 3), "viewer": (3, 4)},
    ]


def test_no_tokens_are_lost_to_a_span_that_finds_no_blocks() -> None:
    driver = make_driver(
        bidirectional_modalities=frozenset({"image"}), max_num_batched_tokens=6, num_blocks=12
    )
    driver.add(make_request("reader", (1,) * 5, sampling_params=tokens(6)))
    run(driver, 2)
    driver.add(make_request("viewer", "six", sampling_params=tokens(1)))
    windows = run(driver, 4)
    assert [w["reader"] for w in windows] == [(6, 7), (7, 8), (8, 9), (9, 10)]
    assert run(driver) == [{"viewer": (0, 6)}]


def test_span_that_waits_for_tokens_keeps_its_claim_on_the_encoder() -> None:
    driver = make_driver(
        bidirectional_modalities=frozenset({"image"}),
        max_num_batched_tokens=6,
        encoder_cache_size=6,
    )
    driver.add(make_request("reader", (1,) * 2, cache_salt="0", sampling_params=tokens(50)))
    driver.add(make_request("writer", (1,) * 3, cache_salt="1", sampling_params=tokens(50)))
    driver.add(make_request("viewer", (1,), "six", cache_salt="2", sampling_params=tokens(1)))
    for index in range(6):
        name = f"rival {index}"
        driver.add(make_request(name, "rows", cache_salt=name, sampling_params=tokens(1)))
    run(driver, 5)
    assert "viewer" not in driver.open


def test_step_that_only_preempted_is_decided_again() -> None:
    """The first waits for encoder space that the last holds, and the last finds no block."""
    driver = make_driver(
        num_blocks=10, max_num_batched_tokens=9, encoder_cache_size=8, max_num_encoder_embeds=2
    )
    driver.add(make_request("earlier", "rows", sampling_params=tokens(1)))
    run(driver)
    driver.add(make_request("first", "two", "six", sampling_params=tokens(1)))
    driver.add(make_request("last", (1,) * 3, "rows", sampling_params=tokens(1)))
    assert run(driver) == [{"first": (0, 2), "last": (0, 7)}]
    output = driver.schedule()
    assert output.stopped_request_ids == ("last",)
    assert get_windows(output) == {"first": (2, 8)}
    driver.finish_step(output, token_id=1)
    driver.drain()
