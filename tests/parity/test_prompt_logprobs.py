"""Log-probabilities of prompts with media are those of one pass of Transformers' model.

Placeholders have them like any token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sensorium import RequestOutput, SamplingParams
from tests.parity.cases import FAMILIES, MAIN_FAMILIES, in_turns
from tests.parity.reference import Expected, Reference, ReferenceOf
from tests.support.engine import assert_nothing_is_left, make_llm

pytestmark = pytest.mark.check("prompt logits")
SCORED = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=4)


@torch.inference_mode()
def get_logprobs(reference: Reference, entry: Expected) -> torch.Tensor:
    if hasattr(reference.model.base_model, "rope_deltas"):
        reference.model.base_model.rope_deltas = None  # left over from the last call
    logits: torch.Tensor = reference.model(**entry.inputs).logits[0]
    return logits.float().log_softmax(-1)


def check(output: RequestOutput, entry: Expected, logprobs: torch.Tensor) -> None:
    assert list(output.prompt_token_ids) == entry.prompt_token_ids, entry.case.name
    first, *rest = output.prompt_logprobs or ()
    assert first is None
    assert len(rest) == len(entry.prompt_token_ids) - 1
    for position, (entries, token_id) in enumerate(
        zip(rest, entry.prompt_token_ids[1:], strict=True)
    ):
        assert entries is not None
        assert token_id in entries
        assert len(entries) in (4, 5)
        for entry_id, found in entries.items():
            # A placeholder may lie outside the vocabulary.
            is_known = entry_id < logprobs.shape[-1]
            expected = float(logprobs[position, entry_id]) if is_known else float("-inf")
            assert found.logprob == pytest.approx(expected, abs=2e-4), (entry.case.name, position)
        best = max(found.logprob for found in entries.values())
        assert best == pytest.approx(float(logprobs[position].max()), abs=2e-4)


@pytest.mark.parametrize(
    ("family", "options"),
    in_turns(
        FAMILIES,
        {"whole": {}, "pieces": {"max_num_batched_tokens": 24, "block_size": 4}},
        MAIN_FAMILIES[::2],
    ),
)
def test_prompt_logprobs_are_those_of_a_forward_pass(
    reference_of: ReferenceOf, family: str, options: dict[str, Any]
) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory, **options)
    prompts = [entry.prompt for entry in reference.expected]
    llm.generate(prompts, replace(SCORED, prompt_logprobs=None), use_tqdm=False)  # warms caches
    outputs = llm.generate(prompts, SCORED, use_tqdm=False)
    for output, entry in zip(outputs, reference.expected, strict=True):
        if family.startswith("gemma4") and entry.case.videos:
            continue  # Transformers' forward pass loses the number of frames; `generate` doesn't
        check(output, entry, get_logprobs(reference, entry))
    assert_nothing_is_left(llm)
