"""Several completions of one prompt equal as many requests.

They cost little more than one prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sensorium import LLM, RequestOutput, SamplingParams
from sensorium.engine.outputs.completions import make_children
from tests.integration.neighbours import make_prompt
from tests.parity.cases import make_image, make_text
from tests.support.engine import Trace, assert_nothing_is_left, get_token_ids, make_llm

TinyModel = Callable[[str], str]
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=10, ignore_eos=True)
PROMPT = make_text(40, seed=1)


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModel) -> LLM:
    return make_llm(tiny_model("llama"))


def generate(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert_nothing_is_left(llm)
    assert len(llm._driver.parallel_sampling) == 0
    return output


def test_each_completion_is_that_of_a_request_with_its_seed(llm: LLM) -> None:
    output = generate(llm, PROMPT, replace(SAMPLED, n=5))
    request = llm.input_processor.process("r", PROMPT, replace(SAMPLED, n=5)).request
    params = [child.sampling_params for child in make_children(request)]
    alone = llm.generate([PROMPT] * 5, params, use_tqdm=False)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3, 4]
    assert [c.token_ids for c in output.outputs] == get_token_ids(alone)
    assert [c.text for c in output.outputs] == [o.outputs[0].text for o in alone]
    assert len({c.token_ids for c in output.outputs}) == 5
    assert params[0].seed == SAMPLED.seed


def test_fewer_completions_are_the_first_of_more(llm: LLM) -> None:
    one, three = (generate(llm, PROMPT, replace(SAMPLED, n=n)) for n in (1, 3))
    assert one.outputs == three.outputs[:1]


def test_unseeded_completions_differ(llm: LLM) -> None:
    output = generate(llm, PROMPT, replace(SAMPLED, n=3, seed=None))
    assert len({c.token_ids for c in output.outputs}) == 3


def test_other_completions_compute_little_of_the_prompt(tiny_model: TinyModel) -> None:
    llm = make_llm(tiny_model("llama"), block_size=4)
    trace = Trace(llm)
    output = generate(llm, PROMPT, replace(SAMPLED, n=8, max_tokens=1))
    num_computed = sum(step.num_scheduled_tokens for step in trace.steps)
    num_prompt = len(output.prompt_token_ids)
    assert num_prompt > 30
    assert num_computed <= num_prompt + 7 * 4
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_media_is_processed_and_encoded_once(tiny_model: TinyModel, family: str) -> None:
    llm = make_llm(tiny_model(family))
    num_calls = 0
    process_item = llm.input_processor.processor.process_item

    def count_and_process(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return process_item(*arguments, **options)

    llm.input_processor.processor.process_item = count_and_process  # type: ignore[method-assign]
    trace = Trace(llm)
    prompt = make_prompt(family, make_image(60, 60, seed=9))
    output = generate(llm, prompt, replace(SAMPLED, n=4))
    assert (num_calls, trace.num_encoded_items) == (1, 1)
    assert len({c.token_ids for c in output.outputs}) == 4
    assert output.outputs[0] == generate(llm, prompt, SAMPLED).outputs[0]


def test_more_completions_than_seats_and_prompts_of_all_kinds(tiny_model: TinyModel) -> None:
    llm = make_llm(tiny_model("llama"), max_num_seqs=3)
    prompts = [make_text(3 + seed, seed=seed) for seed in range(5)]
    counts = [7, 1, 3, 1, 2]
    params = [replace(SAMPLED, n=n, seed=n) for n in counts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs) for output in outputs] == counts
    assert_nothing_is_left(llm)


def test_stop_strings_end_each_completion_separately(llm: LLM) -> None:
    params = replace(SAMPLED, n=6, max_tokens=30)
    free = generate(llm, PROMPT, params)
    stop = next(c for c in free.outputs[0].text[3:] if c.isascii() and c.isprintable())
    stopped = generate(llm, PROMPT, replace(params, stop=stop))
    for before, after in zip(free.outputs, stopped.outputs, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert (after.stop_reason == stop) == (stop in before.text)
    assert len({len(c.token_ids) for c in stopped.outputs}) > 1


def test_one_completion_without_a_token_fails_the_request(llm: LLM) -> None:
    token_id = llm.get_tokenizer()("a")["input_ids"][0]
    params = replace(SAMPLED, n=3, allowed_token_ids=[token_id], bad_words=["aaa"])
    outputs = llm.generate(["b", PROMPT], [SAMPLED, params], use_tqdm=False, return_errors=True)
    assert outputs[0].error is None
    assert "no token is left" in str(outputs[1].error)
    assert len(outputs[1].outputs) == 3
    assert {str(c.finish_reason) for c in outputs[1].outputs} <= {"error", "abort"}
    assert_nothing_is_left(llm)


def test_a_refused_request_leaves_no_completions(llm: LLM) -> None:
    params = replace(SAMPLED, n=3, logit_bias={10**6: 1})
    (output,) = llm.generate(PROMPT, params, use_tqdm=False, return_errors=True)
    assert "logit_bias" in str(output.error)
    assert len(llm._driver.parallel_sampling) == 0
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("call", [1, 2, 4])
def test_an_interruption_leaves_no_completions(tiny_model: TinyModel, call: int) -> None:
    llm = make_llm(tiny_model("llama"))
    step, num_calls = llm.core.step, 0

    def interrupt() -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            raise KeyboardInterrupt
        return step()

    llm.core.step = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, "b"], replace(SAMPLED, n=3), use_tqdm=False)
    assert len(llm._driver.parallel_sampling) == 0
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_abort_ends_all_completions(llm: LLM, num_steps: int) -> None:
    request_id = llm._add(PROMPT, replace(SAMPLED, n=3))
    for _ in range(num_steps):
        llm._step()
    llm._abort((request_id,))
    assert len(llm._driver.parallel_sampling) == 0
    assert_nothing_is_left(llm)
