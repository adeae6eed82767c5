"""Log-probabilities of the prompt are those of one plain forward pass, however it was computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from sensorium import LLM, RequestOutput, SamplingParams
from sensorium.worker import prompt_scorer
from tests.parity.cases import make_text
from tests.support.engine import Trace, assert_nothing_is_left, get_kv_bytes, make_llm

TinyModel = Callable[[str], str]
SCORED = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=3)
PROMPTS = [make_text(2 + 6 * seed, seed=seed) for seed in range(6)]


class PlainModel:
    def __init__(self, directory: str) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def get_logprobs(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        return self._model(torch.tensor([token_ids])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def plain(tiny_model: TinyModel) -> PlainModel:
    return PlainModel(tiny_model("llama"))


def check(output: RequestOutput, logprobs: torch.Tensor, count: int) -> None:
    assert output.error is None
    assert output.prompt_logprobs is not None
    first, *rest = output.prompt_logprobs
    assert first is None
    assert len(rest) == len(output.prompt_token_ids) - 1
    for entries, token_id, row in zip(rest, output.prompt_token_ids[1:], logprobs, strict=False):
        assert entries is not None
        top = row.topk(count)
        assert entries.keys() == {token_id, *top.indices.tolist()}
        for entry_id, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[entry_id]), abs=1e-4)
        assert abs(entries[token_id].rank - int((row > row[token_id]).sum()) - 1) <= 1


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7}, {"enable_prefix_caching": False}, {"max_num_seqs": 1}],
    ids=str,
)
def test_prompt_logprobs_are_those_of_a_plain_forward_pass(
    tiny_model: TinyModel, plain: PlainModel, options: dict[str, Any]
) -> None:
    llm = make_llm(tiny_model("llama"), **options)
    params = [replace(SCORED, prompt_logprobs=count % 4) for count in range(6)]
    for _ in range(2):  # the second time the prefix cache holds all of it
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for output, wanted in zip(outputs, params, strict=True):
            logprobs = plain.get_logprobs(output.prompt_token_ids)
            check(output, logprobs, wanted.prompt_logprobs or 0)
            assert output.num_cached_tokens == 0
    assert_nothing_is_left(llm)


def test_logits_exist_for_a_bounded_number_of_positions(
    tiny_model: TinyModel, plain: PlainModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scorer, "MAX_ROWS", 5)
    llm = make_llm(tiny_model("llama"))
    hf_model = llm.core.runner._hf_model  # type: ignore[attr-defined]
    logits, sizes = hf_model.logits, []

    def note_size(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        result: torch.Tensor = logits(hidden)
        return result

    monkeypatch.setattr(hf_model, "logits", note_size)
    outputs = llm.generate(PROMPTS, SCORED, use_tqdm=False)
    for output in outputs:
        check(output, plain.get_logprobs(output.prompt_token_ids), 3)
    assert max(sizes) <= max(5, len(PROMPTS))


@pytest.mark.parametrize("budget", [7, 64])
def test_preemptions_neither_lose_nor_repeat_prompt_logprobs(
    tiny_model: TinyModel, plain: PlainModel, budget: int
) -> None:
    roomy = make_llm(tiny_model("llama"))
    tokenizer = roomy.get_tokenizer()
    longest = max(len(tokenizer(p)["input_ids"]) for p in PROMPTS) + 30
    llm = make_llm(
        tiny_model("llama"),
        max_model_len=longest,
        block_size=4,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=0,  # all of them run at once, so that some are preempted
        kv_cache_memory_bytes=get_kv_bytes(roomy, longest + 4),
    )
    trace = Trace(llm)
    for output in llm.generate(PROMPTS, replace(SCORED, max_tokens=30), use_tqdm=False):
        check(output, plain.get_logprobs(output.prompt_token_ids), 3)
    starts = [started for step in trace.steps for started in step.started]
    names = [started.request.request_id for started in starts]
    resumed = [s for i, s in enumerate(starts) if s.request.request_id in names[:i]]
    assert resumed
    if budget == 7:
        assert any(not started.output_token_ids for started in resumed)  # within its prompt


def test_other_requests_get_no_prompt_logprobs_and_keep_their_cache(llm: LLM) -> None:
    plain_params = replace(SCORED, prompt_logprobs=None)
    expected = llm.generate(PROMPTS[5], plain_params, use_tqdm=False)[0].outputs
    outputs = llm.generate([PROMPTS[5]] * 2, [SCORED, plain_params], use_tqdm=False)
    assert outputs[1].prompt_logprobs is None
    assert outputs[1].num_cached_tokens > 0
    assert outputs[0].outputs == outputs[1].outputs == expected


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModel) -> LLM:
    return make_llm(tiny_model("llama"))


def test_a_prompt_of_one_token_has_one_empty_entry(llm: LLM) -> None:
    (output,) = llm.generate([[5]], SCORED, use_tqdm=False)
    assert output.prompt_logprobs == (None,)


def test_several_completions_share_the_prompt_logprobs(llm: LLM, plain: PlainModel) -> None:
    params = replace(SCORED, n=3, temperature=1.0, logprobs=2)
    (output,) = llm.generate(PROMPTS[3], params, use_tqdm=False)
    check(output, plain.get_logprobs(output.prompt_token_ids), 3)
    for completion in output.outputs:
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)


def test_prompt_and_completion_agree_about_the_same_tokens(llm: LLM) -> None:
    (first,) = llm.generate(PROMPTS[4], replace(SCORED, logprobs=0), use_tqdm=False)
    completion = first.outputs[0]
    longer = [*first.prompt_token_ids, *completion.token_ids]
    (second,) = llm.generate([longer], SCORED, use_tqdm=False)
    tail = (second.prompt_logprobs or ())[-len(completion.token_ids) :]
    pairs = zip(completion.token_ids, tail, completion.logprobs or (), strict=True)
    for token_id, scored, sampled in pairs:
        assert scored is not None
        assert scored[token_id].logprob == pytest.approx(sampled[token_id].logprob, abs=1e-4)
