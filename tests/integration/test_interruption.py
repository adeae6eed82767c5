"""An interruption in the middle of a call leaves nothing running, and the engine works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sensorium import LLM
from tests.integration.neighbours import PARAMS, make_good_prompts
from tests.support.engine import assert_nothing_is_left, get_token_ids, make_llm

FAMILIES = ["llama", "llava", "qwen2_5_vl", "gemma3"]


def interrupt(owner: Any, name: str, *, call: int, is_after: bool) -> None:
    """Raise once, at the n-th call of a method: before it does its work, or after."""
    method, num_calls = getattr(owner, name), 0

    def run(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call and not is_after:
            raise KeyboardInterrupt
        result = method(*arguments, **options)
        if num_calls == call:
            raise KeyboardInterrupt
        return result

    setattr(owner, name, run)


def assert_it_works_on(llm: LLM, prompts: list[Any], expected: list[tuple[int, ...]]) -> None:
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, PARAMS, use_tqdm=False)
    assert_nothing_is_left(llm)
    assert get_token_ids(llm.generate(prompts, PARAMS, use_tqdm=False)) == expected
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_interruption_between_two_steps_leaves_nothing(
    tiny_model: Callable[[str], str], family: str, call: int, is_after: bool
) -> None:
    prompts = make_good_prompts(family)
    expected = get_token_ids(make_llm(tiny_model(family)).generate(prompts, PARAMS, use_tqdm=False))
    llm = make_llm(tiny_model(family), max_num_seqs=2)
    interrupt(llm.core, "step", call=call, is_after=is_after)
    assert_it_works_on(llm, prompts, expected)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("family", "name"), [("llava", "launch"), ("qwen2_5_vl", "finish"), ("gemma3", "launch")]
)
def test_an_interruption_inside_a_step_leaves_nothing(
    tiny_model: Callable[[str], str], family: str, name: str, is_after: bool
) -> None:
    """Where it nearly always hits: while the model computes, here in the step that encodes."""
    prompts = make_good_prompts(family)[2:]
    expected = get_token_ids(make_llm(tiny_model(family)).generate(prompts, PARAMS, use_tqdm=False))
    llm = make_llm(tiny_model(family))
    interrupt(llm.core.runner, name, call=1, is_after=is_after)
    assert_it_works_on(llm, prompts, expected)


def test_an_interruption_while_a_prompt_is_processed_leaves_nothing(
    tiny_model: Callable[[str], str],
) -> None:
    prompts = make_good_prompts("llava")
    expected = get_token_ids(
        make_llm(tiny_model("llava")).generate(prompts, PARAMS, use_tqdm=False)
    )
    for owner, call, is_after in (("input_processor", 3, False), ("processor", 1, True)):
        llm = make_llm(tiny_model("llava"))
        inputs = llm.input_processor
        name = "process_pausing" if owner == "input_processor" else "process_item"
        target = inputs if owner == "input_processor" else inputs.processor
        interrupt(target, name, call=call, is_after=is_after)
        assert_it_works_on(llm, prompts, expected)
