"""Sampled tokens depend on the prompt, the parameters and the seed, and on nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from sensorium import SamplingParams
from tests.parity.cases import (
    MAIN_FAMILIES,
    MAIN_MULTIMODAL_FAMILIES,
    MODALITIES,
    Case,
    every_fourth,
    make_media,
)
from tests.parity.reference import Reference, ReferenceOf
from tests.support.engine import ROOMS, Trace, get_kv_bytes, get_token_ids, make_llm, make_probe

pytestmark = pytest.mark.check("sampling")

NUM_TOKENS = 12
SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, seed=1234, max_tokens=NUM_TOKENS, ignore_eos=True
)
# What each of the prompts asks for in addition to its seed.
KNOBS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"min_p": 0.02, "top_k": 50},
    {"logit_bias": {40: 2.0, 41: -100.0}, "temperature": 1.2},
    {"bad_words": ("e", "the", "a b")},
    {"allowed_token_ids": tuple(range(20, 120))},
    {"repetition_penalty": 1.1, "min_tokens": 4, "stop_token_ids": (30,), "logprobs": 2},
)
# Rooms that have led to a preemption. They are tried first, because others take long.
FITTING_ROOMS = {"llava_onevision": 61, "voxtral": 23}
Tokens = list[tuple[int, ...]]


def get_prompts(reference: Reference) -> list[dict[str, Any]]:
    return [entry.prompt for entry in reference.expected][:8]


def get_params() -> list[SamplingParams]:
    return [replace(SAMPLED, seed=seed, **knobs) for seed, knobs in enumerate(KNOBS)]


@pytest.fixture(scope="module")
def alone(reference_of: ReferenceOf) -> Any:
    """The tokens of each prompt of a family on its own: one at a time, whole, nothing cached."""

    @cache
    def generate(family: str) -> Tokens:
        prompts = get_prompts(reference_of(family))
        options = {"max_num_seqs": 1, "enable_prefix_caching": False}
        llm = make_llm(reference_of(family).directory, max_num_batched_tokens=2048, **options)
        outputs = llm.generate(prompts, get_params(), use_tqdm=False)
        return get_token_ids(outputs)

    return generate


@pytest.mark.parametrize("family", every_fourth(MAIN_FAMILIES, 2))
def test_sampling_is_not_greedy_and_follows_the_seed(
    reference_of: ReferenceOf, alone: Any, family: str
) -> None:
    reference = reference_of(family)
    greedy = [tuple(entry.token_ids) for entry in reference.expected]
    assert all(ours != theirs for ours, theirs in zip(alone(family), greedy, strict=False))
    llm = make_llm(reference.directory)
    prompts = [get_prompts(reference)[0]] * 4
    params = [replace(SAMPLED, seed=seed) for seed in (0, 7, 0, 7)]
    first, other, again, other_again = get_token_ids(llm.generate(prompts, params, use_tqdm=False))
    assert first == again == alone(family)[0]
    assert other == other_again != first


@pytest.mark.parametrize("family", every_fourth(MAIN_FAMILIES, 3))
def test_every_parameter_changes_the_tokens(
    reference_of: ReferenceOf, alone: Any, family: str
) -> None:
    llm = make_llm(reference_of(family).directory)
    plain = [replace(SAMPLED, seed=seed) for seed in range(8)]
    outputs = llm.generate(get_prompts(reference_of(family)), plain, use_tqdm=False)
    pairs = zip(get_token_ids(outputs), alone(family), strict=True)
    assert sum(without != with_knobs for without, with_knobs in pairs) >= 4


@pytest.mark.parametrize("family", every_fourth(MAIN_FAMILIES, 0))
def test_neighbours_in_the_batch_change_nothing(
    reference_of: ReferenceOf, alone: Any, family: str
) -> None:
    llm = make_llm(reference_of(family).directory, max_num_batched_tokens=2048)
    trace = Trace(llm)
    outputs = llm.generate(get_prompts(reference_of(family)), get_params(), use_tqdm=False)
    assert get_token_ids(outputs) == alone(family)
    assert trace.most_requests_in_a_step >= 6  # those with long audio start later


@pytest.mark.parametrize("family", every_fourth(MAIN_FAMILIES, 1))
def test_chunks_change_nothing(reference_of: ReferenceOf, alone: Any, family: str) -> None:
    llm = make_llm(reference_of(family).directory, max_num_batched_tokens=9)
    trace = Trace(llm)
    outputs = llm.generate(get_prompts(reference_of(family)), get_params(), use_tqdm=False)
    assert get_token_ids(outputs) == alone(family)
    partial = [s for step in trace.steps for s in step.scheduled if not s.num_sampled]
    assert len(partial) > 8


@pytest.mark.parametrize("family", every_fourth(MAIN_FAMILIES, 2))
def test_cached_prefixes_change_nothing(reference_of: ReferenceOf, alone: Any, family: str) -> None:
    llm = make_llm(reference_of(family).directory)
    prompts = get_prompts(reference_of(family))
    llm.generate(prompts, SAMPLED, use_tqdm=False)
    outputs = llm.generate(prompts, get_params(), use_tqdm=False)
    assert get_token_ids(outputs) == alone(family)
    assert sum(output.num_cached_tokens > 0 for output in outputs) >= 3


@pytest.mark.parametrize("family", every_fourth(MAIN_FAMILIES, 3))
def test_preemptions_change_nothing(reference_of: ReferenceOf, alone: Any, family: str) -> None:
    reference = reference_of(family)
    longest = max(len(entry.prompt_token_ids) for entry in reference.expected[:8]) + NUM_TOKENS
    for room in sorted(ROOMS, key=lambda room: room != FITTING_ROOMS.get(family)):
        llm = make_llm(
            reference.directory,
            max_model_len=longest,
            block_size=1,
            kv_cache_memory_bytes=get_kv_bytes(make_probe(reference.directory), longest + room),
        )
        trace = Trace(llm)
        outputs = llm.generate(get_prompts(reference), get_params(), use_tqdm=False)
        assert get_token_ids(outputs) == alone(family)
        if trace.preempted_ids:
            return
    pytest.fail("no request was preempted")


@pytest.mark.parametrize("family", every_fourth(MAIN_FAMILIES, 0))
def test_the_order_of_service_changes_nothing(
    reference_of: ReferenceOf, alone: Any, family: str
) -> None:
    llm = make_llm(reference_of(family).directory, max_num_seqs=2, scheduling_policy="priority")
    trace = Trace(llm)
    prompts = [
        {**prompt, "priority": -index}
        for index, prompt in enumerate(get_prompts(reference_of(family)))
    ]
    outputs = llm.generate(prompts[:4], get_params()[:4], use_tqdm=False)
    assert get_token_ids(outputs) == alone(family)[:4]
    started = [s.request.priority for step in trace.steps for s in step.started]
    assert started == [-3, -2, -1, 0]


@pytest.mark.parametrize("family", every_fourth(MAIN_MULTIMODAL_FAMILIES, 1))
def test_an_item_that_was_sent_before_changes_nothing(
    reference_of: ReferenceOf, family: str
) -> None:
    items = [make_media(MODALITIES[family][0], seed=40) for _ in range(2)]
    parts = [(items[0], "what is it?"), ("and here? ", items[1], " answer")]
    expected = [
        reference_of(family).compute(Case(name=f"{i}", parts=p)) for i, p in enumerate(parts)
    ]
    prompts = [entry.prompt for entry in expected]
    fresh = make_llm(reference_of(family).directory).generate(prompts[1], SAMPLED, use_tqdm=False)
    llm = make_llm(reference_of(family).directory)
    llm.generate(prompts[0], SAMPLED, use_tqdm=False)
    trace = Trace(llm)
    known = llm.generate(prompts[1], SAMPLED, use_tqdm=False)
    assert (fresh[0].num_encoder_hits, known[0].num_encoder_hits) == (0, 1)
    assert trace.num_encoded_items == 0
    assert get_token_ids(known) == get_token_ids(fresh)


@pytest.mark.parametrize("family", ["llama", "llava", "qwen2_5_vl"])
def test_token_ids_with_markers_are_the_same_prompt_as_their_text(
    reference_of: ReferenceOf, alone: Any, family: str
) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory)
    prompts = []
    for prompt in get_prompts(reference):
        token_ids = llm.get_tokenizer()(prompt["prompt"])["input_ids"]
        prompts.append(
            {"prompt_token_ids": token_ids, "multi_modal_data": prompt["multi_modal_data"]}
        )
    outputs = llm.generate(prompts, get_params(), use_tqdm=False)
    for output, entry in zip(outputs, reference.expected, strict=False):
        assert list(output.prompt_token_ids) == entry.prompt_token_ids, entry.case.name
        assert output.prompt is None
    assert get_token_ids(outputs) == alone(family)
