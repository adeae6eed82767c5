"""Neighbours, chunks, preemptions and late masks change no token of a request with a grammar.

The masks of one request are its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count
from typing import Any

import pytest

from sensorium import LLM, SamplingParams
from sensorium.types.scheduling import ModelRunnerOutput
from sensorium.worker.grammar_masks import GrammarMasks, StepMasks
from sensorium.worker.request_states import RequestState
from tests.integration.random_schemas import make_schema
from tests.parity.cases import make_media
from tests.support.engine import ROOMS, Trace, get_kv_bytes, get_token_ids, make_llm

MODELS = ["llama", "qwen2_5_vl"]
PROMPTS = [f"{'Say something. ' * (index % 3 + 1)}{index}:" for index in range(8)]
MAX_TOKENS = 24
# All bytes of the grammar are fixed: its first mask takes half a second.
SLOW = {"choice": ["a" * 200_000]}
GRAMMARS: list[dict[str, Any] | None] = [
    {"json": make_schema(5)},
    None,
    {"regex": "[0-9a-f]{8}(-[0-9a-f]{4}){2}"},
    {"json": make_schema(8)},
    None,
    {"choice": ["first of all", "second", "first"]},
    {"grammar": 'start: "(" (start | /[a-z]{2}/) ")"'},
    {"json_object": True},
]
PARAMS = [
    SamplingParams(
        temperature=0.0 if seed % 3 == 0 else 0.9,
        seed=seed,
        max_tokens=MAX_TOKENS,
        min_tokens=4 if seed == 2 else 0,
        structured_outputs=structured,  # type: ignore[arg-type]
    )
    for seed, structured in enumerate(GRAMMARS)
]
Tokens = list[tuple[int, ...]]


def generate(llm: LLM) -> Tokens:
    return get_token_ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture(scope="module")
def alone(tiny_model: Callable[[str], str]) -> Callable[[str], Tokens]:
    @cache
    def run(model: str) -> Tokens:
        with make_llm(tiny_model(model), max_num_seqs=1, enable_prefix_caching=False) as llm:
            return generate(llm)

    return run


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 9}, {"max_num_seqs": 3}],
    ids=["together", "in chunks", "a few at a time"],
)
def test_the_batch_changes_nothing(
    tiny_model: Callable[[str], str], alone: Any, model: str, options: dict[str, Any]
) -> None:
    with make_llm(tiny_model(model), **options) as llm:
        assert generate(llm) == alone(model)


@pytest.mark.parametrize("model", MODELS)
def test_preemptions_change_nothing(
    tiny_model: Callable[[str], str], alone: Any, model: str
) -> None:
    directory = tiny_model(model)
    with make_llm(directory, block_size=1) as llm:
        tokenizer = llm.get_tokenizer()
        longest = max(len(tokenizer.encode(prompt)) for prompt in PROMPTS) + MAX_TOKENS
        sizes = [get_kv_bytes(llm, longest + room) for room in ROOMS]
    for num_bytes in sizes:
        with make_llm(
            directory, max_model_len=longest, block_size=1, kv_cache_memory_bytes=num_bytes
        ) as llm:
            trace = Trace(llm)
            assert generate(llm) == alone(model)
        constrained = {
            request_id
            for request_id in trace.preempted_ids
            if trace.requests[request_id].sampling_params.structured_outputs is not None
        }
        if constrained:
            return
    pytest.fail("no request with a grammar was preempted")


class Results:
    """What the worker of an engine answers, from now on."""

    def __init__(self, llm: LLM) -> None:
        self.entries: list[ModelRunnerOutput] = []
        self.was_late = threading.Event()
        runner: Any = llm.core.runner
        finish = runner.finish

        def finish_and_note(step: Any) -> ModelRunnerOutput:
            self.entries.append(finish(step))
            if self.entries[-1].late_request_ids:
                self.was_late.set()
            return self.entries[-1]

        runner.finish = finish_and_note


def get_values(logprobs: Any) -> list[float]:
    """One per token that has any: rounding may change which others are likeliest."""
    return [max(entry.logprob for entry in position.values()) for position in logprobs if position]


@pytest.fixture
def llama(tiny_model: Callable[[str], str]) -> Iterator[LLM]:
    # No prompt counts as long: all run in one batch.
    options = {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 0}
    with make_llm(tiny_model("llama"), **options) as llm:
        yield llm


def test_a_grammar_of_many_states_delays_no_other_request(
    llama: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    slow = SamplingParams(temperature=0.0, max_tokens=5, structured_outputs=SLOW)  # type: ignore[arg-type]
    expected = get_token_ids(llama.generate(PROMPTS[:2], plain, use_tqdm=False))
    results = Results(llama)
    prepare = GrammarMasks._prepare

    def prepare_late(masks: GrammarMasks, entry: Any, token_ids: Sequence[int]) -> None:
        """However slow the steps of this machine are."""
        results.was_late.wait(60)
        prepare(masks, entry, token_ids)

    monkeypatch.setattr(GrammarMasks, "_prepare", prepare_late)
    outputs = llama.generate(PROMPTS[:3], [plain, plain, slow], use_tqdm=False)
    assert get_token_ids(outputs[:2]) == expected
    late = [entry for entry in results.entries if entry.late_request_ids]
    assert late
    assert any(entry.token_ids for entry in late)
    assert set(outputs[2].outputs[0].text) == {"a"}
    assert str(outputs[2].outputs[0].finish_reason) == "length"


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_late_masks_change_nothing(
    tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Also behind a picture that ends its prompt, and must not be split."""
    prompt: Any = PROMPTS[2]
    if model == "gemma3":
        picture = make_media("image", seed=1)
        prompt = {"prompt": "Look: <start_of_image>", "multi_modal_data": {"image": picture}}
    params = SamplingParams(
        temperature=0.0,
        max_tokens=6,
        prompt_logprobs=1,
        logprobs=2,
        structured_outputs={"regex": "([ab]c|[cd]{2}){3,9}"},  # type: ignore[arg-type]
    )
    # On time is what the machine makes on time: here all is, but for what is held back.
    monkeypatch.setattr("sensorium.worker.grammar_masks.MAX_WAIT_S", 60.0)
    take = GrammarMasks.take
    calls = count()

    def take_every_other_time(masks: GrammarMasks, states: Sequence[RequestState]) -> StepMasks:
        if next(calls) % 2:
            return take(masks, states)
        return StepMasks(late_ids=frozenset(state.request.request_id for state in states))

    found = []
    for is_late in (False, True):
        if is_late:
            monkeypatch.setattr(GrammarMasks, "take", take_every_other_time)
        with make_llm(tiny_model(model)) as llm:
            results = Results(llm)
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            found.append(output)
        assert any(entry.late_request_ids for entry in results.entries) == is_late
    on_time, late = (output.outputs[0] for output in found)
    assert late.token_ids == on_time.token_ids
    for ours, theirs in (
        (late.logprobs, on_time.logprobs),
        (found[1].prompt_logprobs, found[0].prompt_logprobs),
    ):
        assert get_values(ours) == pytest.approx(get_values(theirs), abs=1e-3)
