"""What `LLM.generate` gives back: order, text, counts, reproducibility, progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sensorium import LLM, RequestError, SamplingParams
from tests.integration.neighbours import PARAMS, make_good_prompts, make_prompt
from tests.parity.cases import make_image, make_text
from tests.support.engine import Trace, assert_nothing_is_left, get_token_ids, make_llm

TinyModel = Callable[[str], str]
PROMPTS = [make_text(3 + 5 * seed, seed=seed) for seed in range(8)]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llama(tiny_model: TinyModel) -> LLM:
    return make_llm(tiny_model("llama"), max_model_len=128)


@pytest.fixture(scope="module")
def llava(tiny_model: TinyModel) -> LLM:
    return make_llm(tiny_model("llava"), max_model_len=128)


def test_text_is_what_the_tokenizer_makes_of_the_tokens(llama: LLM) -> None:
    params = [replace(SAMPLED, max_tokens=60, seed=seed) for seed in range(len(PROMPTS))]
    for output in llama.generate(PROMPTS, params, use_tqdm=False):
        completion = output.outputs[0]
        decode = llama.get_tokenizer().decode
        assert completion.text == decode(completion.token_ids, skip_special_tokens=True)
        assert len(completion.token_ids) == 60
        assert completion.finish_reason == "length"
        assert completion.stop_reason is None
        assert completion.logprobs is None
        assert completion.cumulative_logprob is None


def test_outputs_repeat_the_prompt_as_it_was_given(llama: LLM) -> None:
    text = PROMPTS[1]
    token_ids = llama.get_tokenizer()(text)["input_ids"]
    prompts = [text, {"prompt": text}, token_ids, {"prompt_token_ids": tuple(token_ids)}]
    outputs = llama.generate(prompts, PARAMS, use_tqdm=False)
    assert [output.prompt for output in outputs] == [text, text, None, None]
    assert {output.prompt_token_ids for output in outputs} == {tuple(token_ids)}
    assert len(set(get_token_ids(outputs))) == 1
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize("is_token_ids", [False, True])
def test_one_prompt_gives_one_output(llama: LLM, is_token_ids: bool) -> None:
    prompt = [5, 6, 7] if is_token_ids else "hello"
    assert len(llama.generate(prompt, PARAMS, use_tqdm=False)) == 1
    assert llama.generate([], PARAMS, use_tqdm=False) == []


def test_each_prompt_can_have_its_own_parameters(llama: LLM) -> None:
    params = [replace(PARAMS, max_tokens=count) for count in (1, 5, 3)]
    outputs = llama.generate(PROMPTS[:3], params, use_tqdm=False)
    assert [len(tokens) for tokens in get_token_ids(outputs)] == [1, 5, 3]
    with pytest.raises(RequestError, match="2 sampling params for 3 prompts"):
        llama.generate(PROMPTS[:3], params[:2], use_tqdm=False)


def test_without_max_tokens_the_context_is_filled(llama: LLM) -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for output in llama.generate(PROMPTS[:3], params, use_tqdm=False):
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 128
        assert output.outputs[0].finish_reason == "length"


def test_max_tokens_beyond_the_context_ends_at_the_context(llama: LLM) -> None:
    output = llama.generate(PROMPTS[7], replace(PARAMS, max_tokens=5000), use_tqdm=False)[0]
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 128


def test_more_prompts_than_fit_come_back_in_their_order(tiny_model: TinyModel) -> None:
    llm = make_llm(tiny_model("llama"), max_num_seqs=3)
    trace = Trace(llm)
    most_in_flight = 0
    add_request = llm.core.add_request

    def add_and_count(*arguments: Any) -> Any:
        nonlocal most_in_flight
        missing = add_request(*arguments)
        most_in_flight = max(most_in_flight, len(llm.core.scheduler.requests))
        return missing

    llm.core.add_request = add_and_count  # type: ignore[method-assign]
    prompts = [make_text(2 + seed % 7, seed=seed) for seed in range(25)]
    params = [replace(PARAMS, max_tokens=1 + seed % 5) for seed in range(25)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(tokens) for tokens in get_token_ids(outputs)] == [p.max_tokens for p in params]
    assert trace.most_requests_in_a_step == 3
    assert most_in_flight == 6
    assert_nothing_is_left(llm)


def test_the_progress_bar_goes_to_stderr_and_only_if_wanted(
    llama: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    llama.generate(PROMPTS[:2], PARAMS)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "generate" in shown.err
    assert "2/2" in shown.err
    assert "12 tokens" in shown.err
    llama.generate(PROMPTS[:2], PARAMS, use_tqdm=False)
    hidden = capfd.readouterr()
    assert (hidden.out, hidden.err) == ("", "")


def test_unseeded_sampling_follows_the_seed_of_the_engine(tiny_model: TinyModel) -> None:
    def generate(seed: int) -> list[tuple[int, ...]]:
        llm = make_llm(tiny_model("llama"), seed=seed)
        return get_token_ids(llm.generate([PROMPTS[0]] * 2, SAMPLED, use_tqdm=False))

    first, again, other = generate(1), generate(1), generate(2)
    assert first == again != other
    assert first[0] != first[1]  # two requests of one engine draw different numbers


def test_log_probabilities_belong_to_the_tokens(llama: LLM) -> None:
    params = [replace(SAMPLED, logprobs=count, seed=count) for count in (0, 1, 5)]
    outputs = llama.generate(PROMPTS[:3], params, use_tqdm=False)
    for output, count in zip(outputs, (0, 1, 5), strict=True):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        chosen = []
        for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True):
            own = entries[token_id]
            chosen.append(own.logprob)
            ranked = sorted(entries.values(), key=lambda entry: entry.rank)
            others = [entry for entry in ranked if entry is not own]
            assert len(entries) == max(count, 1) + (own.rank > count > 0)
            assert [e.logprob for e in ranked] == sorted((e.logprob for e in ranked), reverse=True)
            assert [e.rank for e in ranked if e.rank <= count] == list(range(1, count + 1))
            assert all(entry.rank <= count for entry in others)
            assert own.decoded_token == llama.get_tokenizer().decode([token_id])
            assert all(entry.logprob <= 0 for entry in ranked)
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))


def test_salts_separate_the_caches_of_tenants(llava: LLM) -> None:
    prompt = make_prompt("llava", make_image(60, 60, seed=80), text=make_text(20, seed=80))
    outputs = [
        llava.generate({**prompt, **salt}, PARAMS, use_tqdm=False)[0]
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"})
    ]
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, False, False, True]
    assert len(set(get_token_ids(outputs))) == 1
    trace = Trace(llava)
    llava.core.scheduler.kv_cache.clear_cache()
    again = [
        llava.generate({**prompt, "cache_salt": salt}, PARAMS, use_tqdm=False)[0]
        for salt in ("a", "c")
    ]
    assert [output.num_encoder_hits for output in again] == [1, 0]
    assert trace.num_encoded_items == 1


def test_an_engine_is_empty_after_every_call(llava: LLM) -> None:
    for _ in range(3):
        llava.generate(make_good_prompts("llava"), SAMPLED, use_tqdm=False)
        assert_nothing_is_left(llava)


def test_token_ids_may_come_as_arrays_and_tensors(tiny_model: Callable[[str], str]) -> None:
    llm = LLM(Path(tiny_model("llama")), max_model_len=64, max_num_seqs=2, dtype=torch.float32)
    ids = llm.get_tokenizer()("hello world")["input_ids"]
    expected = llm.generate([ids], use_tqdm=False)[0].outputs[0].token_ids
    for form in (ids, np.array(ids), torch.tensor(ids), list(np.array(ids))):
        assert llm.generate(form, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_a_refused_prompt_keeps_its_text(tiny_model: Callable[[str], str]) -> None:
    llm = LLM(tiny_model("llama"), max_model_len=8, max_num_seqs=2)
    text = "hello world " * 20
    outputs = llm.generate([text, {"prompt": text}], use_tqdm=False, return_errors=True)
    assert [output.prompt for output in outputs] == [text, text]


def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenised(llama: LLM) -> None:
    text = "hello world " * 200_000
    messages = [{"role": "user", "content": text}]
    with pytest.raises(RequestError, match=r"2400000 characters.*127 tokens"):
        llama.generate(text, use_tqdm=False)
    with pytest.raises(RequestError, match=r"24000\d\d characters.*127 tokens"):
        llama.chat(messages, use_tqdm=False)
