"""Greedy float32 tokens equal those of `model.generate`, however the engine gets to them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.cases import (
    FAMILIES,
    MAIN_FAMILIES,
    MODALITIES,
    MULTIMODAL_FAMILIES,
    every_fourth,
    in_turns,
    make_repeated_case,
    with_slow_relatives,
)
from tests.parity.reference import GREEDY, NUM_TOKENS, ReferenceOf, get_differences
from tests.support.engine import (
    ROOMS,
    Trace,
    assert_nothing_is_left,
    get_hf_model,
    get_kv_bytes,
    get_largest_item,
    make_llm,
    make_probe,
    run_staggered,
)


@pytest.mark.check("alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_alone_gives_the_reference_tokens(reference_of: ReferenceOf, family: str) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory, enable_prefix_caching=False)
    outputs = [
        llm.generate(entry.prompt, GREEDY, use_tqdm=False)[0] for entry in reference.expected
    ]
    assert get_differences(outputs, reference.expected) == []
    assert_nothing_is_left(llm)


@pytest.mark.check("budgets")
@pytest.mark.parametrize(
    ("family", "budget"), in_turns(FAMILIES, {"7": 7, "24": 24, "4096": 4096}, MAIN_FAMILIES)
)
def test_staggered_requests_give_the_reference_tokens(
    reference_of: ReferenceOf, family: str, budget: int
) -> None:
    reference = reference_of(family)
    assert len(reference.expected) >= 8
    llm = make_llm(reference.directory, max_num_batched_tokens=budget)
    trace = Trace(llm)
    outputs = run_staggered(llm, [entry.prompt for entry in reference.expected], GREEDY)
    assert get_differences(outputs, reference.expected) == []
    assert trace.most_requests_in_a_step >= 2
    for modality in MODALITIES[family]:
        if modality in get_hf_model(llm).bidirectional_modalities:
            assert trace.num_split_items[modality] == 0
        elif budget == 7:
            assert trace.num_split_items[modality] > 0
    assert_nothing_is_left(llm)


@pytest.mark.check("block sizes")
@pytest.mark.parametrize(
    ("family", "block_size"),
    [("llama", 1), ("llava", 5), ("qwen2_5_vl", 5), ("gemma3", 1), ("gemma4", 5), ("qwen3_vl", 1)],
)
def test_every_block_size_gives_the_reference_tokens(
    reference_of: ReferenceOf, family: str, block_size: int
) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory, block_size=block_size, max_num_batched_tokens=40)
    prompts = [entry.prompt for entry in reference.expected]
    for _ in range(2):  # fresh, then with what the first pass left in the caches
        outputs = run_staggered(llm, prompts, GREEDY, steps_between=1)
        assert get_differences(outputs, reference.expected) == []
    assert_nothing_is_left(llm)


@pytest.mark.check("prefix cache")
@pytest.mark.parametrize("family", every_fourth(FAMILIES, 1))
def test_cached_prefixes_give_the_reference_tokens(reference_of: ReferenceOf, family: str) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory, max_num_batched_tokens=24)
    prompts = [entry.prompt for entry in reference.expected]
    llm.generate(prompts, GREEDY, use_tqdm=False)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert get_differences(outputs, reference.expected) == []
    long_enough = [len(entry.prompt_token_ids) > 2 * 16 for entry in reference.expected]
    assert sum(long_enough) >= 3
    for output, is_long in zip(outputs, long_enough, strict=True):
        assert output.num_cached_tokens > 0 or not is_long


@pytest.mark.check("encoder cache")
@pytest.mark.parametrize("family", every_fourth(MULTIMODAL_FAMILIES, 2))
def test_cached_encoder_outputs_give_the_reference_tokens(
    reference_of: ReferenceOf, family: str
) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory, max_num_batched_tokens=24, enable_prefix_caching=False)
    prompts = [entry.prompt for entry in reference.expected]
    llm.generate(prompts, GREEDY, use_tqdm=False)
    trace = Trace(llm)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert get_differences(outputs, reference.expected) == []
    assert trace.num_encoded_items == 0
    num_items = [entry.case.num_items for entry in reference.expected]
    assert [output.num_encoder_hits for output in outputs] == num_items
    assert [output.num_cached_tokens for output in outputs] == [0] * len(outputs)


@pytest.mark.check("encoder cache")
@pytest.mark.parametrize(
    "family", with_slow_relatives([f for f in MULTIMODAL_FAMILIES if f != "audioflamingo3"])
)
def test_an_item_that_stands_twice_in_a_prompt_is_encoded_once(
    reference_of: ReferenceOf, family: str
) -> None:
    reference = reference_of(family)
    case = make_repeated_case(MODALITIES[family][0])
    expected = [reference.compute(case)]
    llm = make_llm(reference.directory, max_num_batched_tokens=24)
    trace = Trace(llm)
    outputs = llm.generate([e.prompt for e in expected], GREEDY, use_tqdm=False)
    assert get_differences(outputs, expected) == []
    assert trace.num_encoded_items == 1
    assert outputs[0].num_encoder_hits == 1


@pytest.mark.check("eviction")
@pytest.mark.parametrize("family", every_fourth(MULTIMODAL_FAMILIES, 3))
def test_a_full_encoder_cache_gives_the_reference_tokens(
    reference_of: ReferenceOf, family: str
) -> None:
    reference = reference_of(family)
    prompts = [entry.prompt for entry in reference.expected]
    size = get_largest_item(make_probe(reference.directory), prompts)
    llm = make_llm(reference.directory, encoder_cache_size=size, max_num_batched_tokens=64)
    outputs = run_staggered(llm, [entry.prompt for entry in reference.expected], GREEDY)
    assert get_differences(outputs, reference.expected) == []
    statistics = llm.core.scheduler.encoder_cache.statistics()
    assert statistics.num_evictions > 0
    assert statistics.num_used_embeds <= size
    assert_nothing_is_left(llm)


@pytest.mark.check("whole items")
@pytest.mark.parametrize("family", every_fourth(MULTIMODAL_FAMILIES, 0))
def test_items_that_are_kept_whole_give_the_reference_tokens(
    reference_of: ReferenceOf, family: str
) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory, max_num_batched_tokens=7, disable_chunked_mm_input=True)
    trace = Trace(llm)
    outputs = run_staggered(llm, [entry.prompt for entry in reference.expected], GREEDY)
    assert get_differences(outputs, reference.expected) == []
    assert trace.num_split_items.total() == 0


@pytest.mark.check("preemption")
@pytest.mark.parametrize(
    ("family", "options"),
    in_turns(
        FAMILIES,
        {
            "24": {"max_num_batched_tokens": 24, "enable_prefix_caching": True},
            "4096": {"max_num_batched_tokens": 4096, "enable_prefix_caching": False},
        },
        MAIN_FAMILIES[1::3],
    ),
)
def test_preempted_requests_give_the_reference_tokens(
    reference_of: ReferenceOf, family: str, options: dict[str, Any]
) -> None:
    reference = reference_of(family)
    longest = max(len(entry.prompt_token_ids) for entry in reference.expected) + NUM_TOKENS
    expected = [*reference.expected, *reversed(reference.expected)]
    for room in ROOMS:
        llm = make_llm(
            reference.directory,
            max_model_len=longest,
            block_size=1,
            **options,
            kv_cache_memory_bytes=get_kv_bytes(make_probe(reference.directory), longest + room),
        )
        trace = Trace(llm)
        outputs = run_staggered(llm, [entry.prompt for entry in expected], GREEDY, steps_between=1)
        assert get_differences(outputs, expected) == []
        assert_nothing_is_left(llm)
        if trace.preempted_ids:
            return
    pytest.fail("no request was preempted")


@pytest.mark.check("options")
@pytest.mark.parametrize(
    ("family", "processor_kwargs"),
    [
        ("llava", {"do_normalize": False}),
        ("qwen2_5_vl", {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 6}}),
        ("gemma3", {"do_normalize": False}),
    ],
)
def test_options_of_the_processor_give_the_reference_tokens(
    reference_of: ReferenceOf, family: str, processor_kwargs: dict[str, Any]
) -> None:
    """And what was cached of an image under one set of options is not used under another."""
    reference = reference_of(family)
    cases = [entry.case for entry in reference.expected[1:4]]
    plain = list(reference.expected[1:4])
    changed = [reference.compute(case, **processor_kwargs) for case in cases]
    assert [entry.token_ids for entry in plain] != [entry.token_ids for entry in changed]
    llm = make_llm(reference.directory)
    for expected in (plain, changed, plain):
        outputs = llm.generate([entry.prompt for entry in expected], GREEDY, use_tqdm=False)
        assert get_differences(outputs, expected) == []
