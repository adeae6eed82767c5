from __future__ import annotations

import pytest

from sensorium.core.kv_cache_manager import KVCacheManager, PrefixHit
from sensorium.core.request import Request
from sensorium.types.sampling import SamplingParams
from tests.property.scheduler_driver import SchedulerDriver
from tests.property.strategies import make_request

from .building import make_driver, run, tokens

# Steps of 8 tokens; a prompt of more than 4 is long.
BUDGET = 8
THRESHOLD = 4


def make(*, pause: int = 0, **changes: int | bool) -> SchedulerDriver:
    return make_driver(
        num_blocks=1001,
        long_prefill_token_threshold=THRESHOLD,
        long_prefill_pause=pause,
        **{"max_model_len": 500, "max_num_batched_tokens": BUDGET, **changes},
    )


def add(
    driver: SchedulerDriver,
    name: str,
    num_tokens: int,
    max_tokens: int = 1,
    group: str | None = None,
) -> None:
    """Add a request that shares its prefix with no other."""
    request = make_request(
        name,
        (1,) * num_tokens,
        cache_salt=name,
        group=group,
        sampling_params=tokens(max_tokens),
    )
    assert driver.add(request)


def count_new(windows: dict[str, tuple[int, int]], name: str) -> int:
    start, end = windows.get(name, (0, 0))
    return end - start


def test_a_new_request_does_not_wait_for_a_whole_long_prompt() -> None:
    driver = make()
    add(driver, "long", 80)
    run(driver, 2)
    add(driver, "short", 3)
    assert run(driver, 2) == [
        {"long": (16, 20), "short": (0, 3)},  # and it has its first token
        {"long": (20, 28)},
    ]


def test_a_new_request_does_not_wait_for_queued_long_prompts() -> None:
    driver = make()
    for index in range(20):
        add(driver, f"long {index}", 80)
    add(driver, "short", 3)
    assert run(driver) == [{"long 0": (0, 4), "short": (0, 3)}]


def test_long_prompts_of_one_length_are_computed_one_after_the_other() -> None:
    driver = make()
    for name in "abc":
        add(driver, name, 12)
    assert run(driver, 5) == [
        {"a": (0, 8)},
        {"a": (8, 12), "b": (0, 4)},
        {"b": (4, 12)},
        {"c": (0, 8)},
        {"c": (8, 12)},
    ]


def test_without_a_pause_decoding_takes_nothing_from_a_long_prompt() -> None:
    driver = make()
    add(driver, "reader", 1, max_tokens=50)
    run(driver)
    add(driver, "long", 80)
    assert [count_new(windows, "long") for windows in run(driver, 3)] == [7, 7, 7]


def test_a_long_prompt_pauses_while_others_decode() -> None:
    driver = make(pause=3)
    add(driver, "reader", 1, max_tokens=50)
    run(driver)
    add(driver, "long", 20)
    steps = run(driver, 10)
    assert [count_new(windows, "long") for windows in steps] == [7, 0, 0, 0, 7, 0, 0, 0, 6, 0]
    assert all("reader" in windows for windows in steps)


def test_a_single_long_prompt_does_not_pause_and_its_pieces_grow() -> None:
    driver = make(pause=3)
    add(driver, "long", 30)
    steps = run(driver, 6)
    assert [count_new(windows, "long") for windows in steps] == [1, 2, 4, 8, 8, 7]


def test_frequent_new_requests_find_a_small_piece_under_way() -> None:
    driver = make(pause=3)
    add(driver, "long", 200)
    run(driver, 8)
    for index in range(4):
        add(driver, f"short {index}", 3)
        (windows,) = run(driver)
        assert f"short {index}" in windows
        assert [count_new(windows, "long") for windows in run(driver, 2)] == [1, 2]


def test_a_new_request_runs_in_a_pause_of_the_long_prompt() -> None:
    driver = make(pause=3)
    add(driver, "long", 80)
    run(driver, 4)
    add(driver, "short", 4, max_tokens=2)
    assert run(driver, 3) == [{"short": (0, 4)}, {"short": (4, 5)}, {"long": (15, 16)}]


def test_the_next_long_prompt_also_pauses() -> None:
    driver = make(pause=3)
    add(driver, "first", 15)
    add(driver, "second", 15)
    run(driver, 4)
    assert list(driver.open) == ["second"]
    add(driver, "short", 1, max_tokens=3)
    names = [set(windows) for windows in run(driver, 4)]
    assert names == [{"short"}, {"short"}, {"short"}, {"second"}]


def test_a_prompt_half_as_long_takes_turns_with_the_first() -> None:
    driver = make()
    add(driver, "a", 80)
    run(driver)
    add(driver, "b", 30)
    assert run(driver, 8) == [
        {"b": (0, 8)},
        {"a": (8, 16)},
        {"b": (8, 16)},
        {"a": (16, 24)},
        {"b": (16, 24)},
        {"a": (24, 32)},
        {"a": (32, 34), "b": (24, 30)},
        {"a": (34, 42)},
    ]


def test_a_prompt_almost_as_long_waits_for_the_first() -> None:
    driver = make()
    add(driver, "a", 40)
    run(driver)
    add(driver, "b", 17)
    assert [set(windows) for windows in run(driver, 4)] == [{"a"}] * 4
    assert run(driver) == [{"b": (0, 8)}]


def test_a_long_prompt_that_is_cached_is_a_short_one() -> None:
    driver = make()
    request = make_request("r", (2,) * 60, sampling_params=tokens(1))
    driver.add(request)
    driver.drain()
    add(driver, "long", 80)
    run(driver)
    driver.add(request)
    assert run(driver) == [{"long": (8, 12), "r": (59, 60)}]


def test_a_prompt_that_is_not_cached_any_more_waits_among_the_long_ones() -> None:
    driver = make()
    request = make_request("r", (2,) * 60, sampling_params=tokens(1))
    driver.add(request)
    driver.drain()
    add(driver, "long", 24)
    run(driver)
    driver.add(request)
    driver.kv_cache.clear_cache()
    assert run(driver, 4) == [
        {"long": (8, 12)},  # it counted as a newcomer until its turn came
        {"long": (12, 20)},
        {"long": (20, 24), "r": (0, 4)},
        {"r": (4, 12)},
    ]


def test_less_urgent_requests_take_nothing_from_a_long_prompt() -> None:
    driver = make(pause=3, policy="priority")
    add(driver, "long", 80)
    run(driver)
    for index in range(3):
        request = make_request(f"late {index}", (1,), priority=1, sampling_params=tokens(9))
        driver.add(request)
    assert [count_new(windows, "long") for windows in run(driver, 4)] == [2, 4, 8, 8]


def test_a_step_is_not_left_empty_for_a_pause() -> None:
    """The only other request waits for blocks that the long prompt has."""
    driver = make_driver(
        num_blocks=40,
        disable_chunked_mm_input=True,
        long_prefill_token_threshold=THRESHOLD,
        long_prefill_pause=50,
    )
    add(driver, "long", 38)
    run(driver, 6)
    driver.add(make_request("other", "nine", cache_salt="x", sampling_params=tokens(1)))
    assert run(driver) == [{"long": (31, 38)}]
    driver.drain()


def test_encoders_rest_while_a_token_is_still_being_computed() -> None:
    """Neither a step under way nor a long prompt is a reason to encode."""
    driver = make(pause=1, is_ahead=True, max_num_encoder_embeds=1)
    params = SamplingParams(max_tokens=60, ignore_eos=True, presence_penalty=0.5)
    driver.add(make_request("reader", (1,), sampling_params=params))
    run(driver, 2)
    driver.add(make_request("a", "three", (1,) * 6, cache_salt="a", sampling_params=tokens(1)))
    run(driver)
    driver.add(make_request("b", "two", (2,) * 6, cache_salt="b", sampling_params=tokens(1)))
    run(driver, 12)  # the driver checks that encoders rest
    assert list(driver.open) == ["reader"]


@pytest.mark.parametrize("pause", [0, 3])
def test_a_long_prompt_does_not_wait_for_a_call_that_has_its_share_of_seats(pause: int) -> None:
    driver = make(pause=pause, max_num_seqs=4)
    for index in range(20):
        add(driver, f"many {index}", 6, max_tokens=100, group="many")
    while len(driver.scheduler.running) < 4:
        driver.step()
    add(driver, "other", 7)
    steps = run(driver, 2 + 2 * pause)
    assert "other" in set().union(*steps)
    assert "many 4" not in set().union(*steps)


@pytest.mark.parametrize("pause", [0, 3])
@pytest.mark.parametrize("num_before", range(4))
def test_a_long_prompt_does_not_wait_for_all_long_prompts_of_another_call(
    num_before: int, pause: int
) -> None:
    """They are shorter, but as soon as one of them has ended it is this one's turn."""
    driver = make(pause=pause)
    for index in range(20):
        add(driver, f"many {index}", 16, group="many")
    run(driver, num_before)
    num_open = len(driver.open)
    add(driver, "other", 24)
    while "other" in driver.open:
        driver.step()
    assert num_open - len(driver.open) <= 4


def test_calls_with_many_long_prompts_take_turns() -> None:
    driver = make()
    for group in ("a", "b", "c"):
        for index in range(6):
            add(driver, f"{group} {index}", 16, group=group)
    ended: list[str] = []
    while driver.open:
        before = list(driver.open)
        driver.step()
        ended += [name for name in before if name not in driver.open]
    for start in range(0, 18, 3):
        assert {name[0] for name in ended[start : start + 3]} == {"a", "b", "c"}


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_long_prompt_does_not_take_a_seat_that_was_made_free_for_another(num_steps: int) -> None:
    driver = make(max_num_seqs=8, max_num_batched_tokens=16)
    add(driver, "long", 200)
    for index in range(7):
        add(driver, f"many {index}", 1, max_tokens=50, group="many")
    run(driver, num_steps)
    add(driver, "other long", 30)
    add(driver, "short", 1)
    (windows,) = run(driver)
    assert "short" in windows


def test_a_long_prompt_that_finds_no_seat_takes_no_turn_from_those_that_run() -> None:
    """Else "many 2" would have every turn, as a new request always takes the last seat."""
    driver = make(max_num_seqs=4)
    for index in range(2):
        add(driver, f"many {index}", 1, max_tokens=100, group="many")
    run(driver)
    add(driver, "many 2", 6, group="many")
    add(driver, "long", 80)
    for index in range(10):
        add(driver, f"new {index}", 1)
        (windows,) = run(driver)
        assert count_new(windows, "long") > 0
    assert "many 2" in driver.open


def test_without_a_threshold_no_prompt_is_long() -> None:
    driver = make_driver(long_prefill_pause=3)
    add(driver, "a", 20)
    add(driver, "b", 3)
    assert run(driver, 3) == [{"a": (0, 8)}, {"a": (8, 16)}, {"a": (16, 20), "b": (0, 3)}]


def test_long_prompts_that_wait_cost_nothing_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []

    def find_prefix(cache: KVCacheManager, request: Request, max_tokens: int) -> PrefixHit:
        searched.append(request.request_id)
        return original(cache, request, max_tokens)

    driver = make()
    for index in range(100):
        add(driver, f"long {index}", 80)
    original = KVCacheManager.find_prefix
    monkeypatch.setattr(KVCacheManager, "find_prefix", find_prefix)
    run(driver, 5)
    assert searched == ["long 0"]
