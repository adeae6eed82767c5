"""Runs good requests together with a bad one, which must not change their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sensorium import LLM, RequestError, SamplingParams
from sensorium.types.multimodal import MultiModalKwargsItem
from tests.parity.cases import make_image
from tests.support.engine import (
    add_with_tensors,
    assert_nothing_is_left,
    get_token_ids,
    process_with_tensors,
)

OPTIONS = {"max_model_len": 256, "encoder_cache_size": 48, "limit_mm_per_prompt": {"image": 2}}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MARKERS = {
    "llava": "<image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
}
Change = Callable[[dict[str, torch.Tensor]], MultiModalKwargsItem]


def make_prompt(family: str, *images: object, text: str = "what is this?") -> dict[str, Any]:
    """Return a prompt of one marker for each image, followed by the text."""
    return {"prompt": MARKERS[family] * len(images) + text, "multi_modal_data": {"image": images}}


def make_good_prompts(family: str) -> list[Any]:
    texts = ["hello world", "the quick brown fox jumps over the lazy dog"]
    if family == "llama":
        return texts
    images = [make_image(60, 60, seed=seed) for seed in range(50, 53)]
    return [*texts, make_prompt(family, images[0]), make_prompt(family, *images[1:])]


class Neighbours:
    """An engine, good prompts for it, and their tokens without a bad request in the batch."""

    def __init__(self, llm: LLM, prompts: list[Any]) -> None:
        self.llm = llm
        self._prompts = prompts
        self._expected = get_token_ids(llm.generate(prompts, PARAMS, use_tqdm=False))

    def fail(self, bad_prompt: Any, params: SamplingParams = PARAMS) -> str:
        """Return the error of a bad prompt that runs between the good ones."""
        self._clear_caches()
        prompts = [self._prompts[0], bad_prompt, *self._prompts[1:]]
        all_params = [PARAMS, params, *[PARAMS] * (len(prompts) - 2)]
        outputs = self.llm.generate(prompts, all_params, use_tqdm=False, return_errors=True)
        bad = outputs.pop(1)
        assert get_token_ids(outputs) == self._expected
        self._assert_that_all_is_well()
        assert isinstance(bad.error, RequestError)
        assert bad.outputs[0].finish_reason == "error"
        return str(bad.error)

    def fail_with_tensors(self, prompt: Any, change: Change) -> str:
        """Return the error of a prompt if its tensors are changed on their way into the core."""
        self._clear_caches()
        ids = [self.llm._add(self._prompts[0], PARAMS)]
        error: RequestError | None = None
        bad_id = None
        try:
            bad_id = self._add_with_tensors(prompt, change)
        except RequestError as refusal:
            error = refusal
        ids += [self.llm._add(good, PARAMS) for good in self._prompts[1:]]
        outputs = {}
        while self.llm.core.has_requests:
            outputs |= {output.request_id: output for output in self.llm._step()}
        assert get_token_ids([outputs[request_id] for request_id in ids]) == self._expected
        self._assert_that_all_is_well()
        error = outputs[bad_id].error if bad_id is not None else error
        assert error is not None
        return str(error)

    def _add_with_tensors(self, prompt: Any, change: Change) -> str:
        request_id = f"bad-{next(self.llm._ids)}"
        processed, tensors = process_with_tensors(self.llm, request_id, prompt, PARAMS)
        payloads = {name: change({**item}) for name, item in tensors.items()}
        add_with_tensors(self.llm, processed.request, payloads)
        self.llm._driver.outputs.add_request(processed.request, processed.prompt)
        return request_id

    def _clear_caches(self) -> None:
        """Clear the caches, so that good and bad requests are encoded and computed together."""
        self.llm.core.scheduler.encoder_cache.clear_cache()
        self.llm.core.scheduler.kv_cache.clear_cache()

    def _assert_that_all_is_well(self) -> None:
        assert_nothing_is_left(self.llm)
        again = self.llm.generate(self._prompts, PARAMS, use_tqdm=False)
        assert get_token_ids(again) == self._expected
        assert_nothing_is_left(self.llm)
