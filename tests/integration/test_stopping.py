"""Where a completion ends: stop strings, stop tokens, the least number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sensorium import LLM, CompletionOutput, SamplingParams
from tests.parity.cases import make_text
from tests.support.engine import assert_nothing_is_left, make_llm

SAMPLED = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
PROMPT = make_text(5, seed=5)


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], str]) -> LLM:
    return make_llm(tiny_model("llama"))


def generate(llm: LLM, params: SamplingParams) -> CompletionOutput:
    output = llm.generate(PROMPT, params, use_tqdm=False)[0]
    assert_nothing_is_left(llm)
    return output.outputs[0]


def find_border(llm: LLM) -> tuple[SamplingParams, CompletionOutput, str]:
    """Parameters, what they give, and two characters of two tokens, where these first meet."""
    for seed in range(50):
        params = replace(SAMPLED, seed=seed)
        completion = generate(llm, params)
        for count in range(5, 35):
            before = llm.get_tokenizer().decode(completion.token_ids[:count])
            pair = completion.text[len(before) - 1 : len(before) + 1]
            is_first = completion.text.find(pair) == len(before) - 1
            if (
                completion.text.startswith(before)
                and pair.isascii()
                and len(pair) == 2
                and is_first
            ):
                return params, completion, pair
    raise AssertionError("no seed gives two tokens of plain text side by side")


@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_string_over_the_border_of_two_tokens_ends_the_text(
    llm: LLM, is_included: bool
) -> None:
    params, free, stop = find_border(llm)
    stopped = generate(
        llm, replace(params, stop=("never seen", stop), include_stop_str_in_output=is_included)
    )
    end = free.text.index(stop) + (len(stop) if is_included else 0)
    assert stopped.text == free.text[:end]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == stop
    count = len(stopped.token_ids)
    assert stopped.token_ids == free.token_ids[:count]
    decode = llm.get_tokenizer().decode
    assert stop in decode(stopped.token_ids)
    assert stop not in decode(stopped.token_ids[:-1])


def test_the_stop_string_that_comes_first_wins(llm: LLM) -> None:
    params, free, stop = find_border(llm)
    at = free.text.index(stop)
    later = free.text[at + 1 : at + 4]
    stopped = generate(llm, replace(params, stop=(later, stop)))
    assert stopped.stop_reason in (stop, later)
    assert stopped.text == free.text[: free.text.index(str(stopped.stop_reason))]


def test_a_stop_string_given_as_one_string_is_one_stop_string(llm: LLM) -> None:
    params, free, stop = find_border(llm)
    stopped = generate(llm, replace(params, stop=stop))  # type: ignore[arg-type]
    assert stopped.text == free.text[: free.text.index(stop)]


def test_a_stop_string_before_the_least_number_of_tokens_is_ignored(llm: LLM) -> None:
    params, free, stop = find_border(llm)
    end = len(generate(llm, replace(params, stop=(stop,))).token_ids)
    passed = generate(llm, replace(params, stop=(stop,), min_tokens=end))
    assert len(passed.token_ids) > end
    assert passed.token_ids == free.token_ids[: len(passed.token_ids)]
    reached = generate(llm, replace(params, stop=(stop,), min_tokens=end - 1))
    assert len(reached.token_ids) == end


@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_token_ends_the_tokens(llm: LLM, is_included: bool) -> None:
    params = replace(SAMPLED, seed=3)
    free = generate(llm, params)
    index = next(i for i in range(4, 40) if free.token_ids[i] not in free.token_ids[:i])
    stop = free.token_ids[index]
    stopped = generate(
        llm, replace(params, stop_token_ids=(stop,), include_stop_str_in_output=is_included)
    )
    assert stopped.token_ids == free.token_ids[: index + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == stop
    shown = stopped.token_ids if is_included else stopped.token_ids[:-1]
    assert stopped.text == llm.get_tokenizer().decode(shown)


def test_a_stop_token_cannot_come_before_the_least_number_of_tokens(llm: LLM) -> None:
    greedy = replace(SAMPLED, temperature=0.0, max_tokens=12)
    free = generate(llm, greedy)
    stop = free.token_ids[2]
    stopped = generate(llm, replace(greedy, stop_token_ids=(stop,), min_tokens=6))
    assert stop not in stopped.token_ids[:6]
    assert len(stopped.token_ids) >= 6
    assert stopped.token_ids[:2] == free.token_ids[:2]


def test_the_last_token_may_be_the_stop_token(llm: LLM) -> None:
    greedy = replace(SAMPLED, temperature=0.0, max_tokens=1)
    free = generate(llm, greedy)
    stopped = generate(llm, replace(greedy, stop_token_ids=free.token_ids))
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")
    assert stopped.text == ""
