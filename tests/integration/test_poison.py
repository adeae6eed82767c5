"""What one request breaks never reaches another: neither by cached blocks nor by reused memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sensorium import LLM, SamplingParams
from sensorium.types.request import FinishReason
from tests.support.engine import assert_nothing_is_left

TinyModel = Callable[[str], str]
TEXT = "the quick brown fox jumps over the lazy dog count the objects and name colors"
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def test_blocks_of_a_request_that_a_failed_image_ends_are_never_hits(tiny_model: TinyModel) -> None:
    """The second prompt's window ends where the image begins, in the step in which it fails."""
    llm = LLM(
        tiny_model("gemma3"),
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        block_size=4,
    )
    expected = llm.generate(f"{TEXT} and then", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.core.scheduler.kv_cache.clear_cache()
    image = np.full((60, 60, 3), np.nan, np.float32)
    bad = [
        {"prompt": text, "multi_modal_data": {"image": image}}
        for text in ("hi <start_of_image> ok", f"{TEXT} <start_of_image> what?")
    ]
    failed = llm.generate(bad, GREEDY, use_tqdm=False, return_errors=True)
    assert [output.outputs[0].finish_reason for output in failed] == [FinishReason.ERROR] * 2
    assert_nothing_is_left(llm)
    output = llm.generate(f"{TEXT} and then", GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == expected


def test_numbers_that_are_not_finite_end_only_their_request(tiny_model: TinyModel) -> None:
    """With few blocks and no cache, the next request writes into the very blocks of the bad one."""
    llm = LLM(
        tiny_model("llama"),
        max_model_len=48,
        max_num_seqs=1,
        kv_cache_memory_bytes=50_000,
        enable_prefix_caching=False,
    )
    expected = llm.generate("hello world", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    embedding = llm.core.runner._hf_model.embedding  # type: ignore[attr-defined]
    with torch.no_grad():
        embedding.weight[300] = torch.nan
    failed = llm.generate([[300] * 40], GREEDY, use_tqdm=False, return_errors=True)[0]
    assert failed.outputs[0].finish_reason is FinishReason.ERROR
    assert "not a finite number" in str(failed.error)
    assert llm.generate("hello world", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert_nothing_is_left(llm)


def test_a_request_that_may_choose_no_token_fails_instead_of_choosing_one(
    tiny_model: TinyModel,
) -> None:
    llm = LLM(tiny_model("llama"), max_model_len=64, max_num_seqs=2)
    every = tuple(range(llm.core.runner._hf_model.vocab_size))  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=every)
    outputs = llm.generate(["hello", "hello"], [params, GREEDY], use_tqdm=False, return_errors=True)
    assert outputs[0].outputs[0].finish_reason is FinishReason.ERROR
    assert outputs[1].error is None
