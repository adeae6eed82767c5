"""Greedy float32 tokens equal those of `model.generate` on the same device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sensorium import RequestOutput
from tests.parity.driver import assert_nothing_is_left, run_staggered
from tests.parity.reference import GREEDY, Expected, get_differences

from .setting import get_reference, make_device_llm

BUDGETS = (7, 24, 4096)


def check_float32(family: str, budget: int) -> str:
    reference = get_reference(family, torch.float32)
    llm = make_device_llm(family, torch.float32, max_num_batched_tokens=budget)
    assert llm.config.attention_backend == "torch"  # flash kernels have no float32
    prompts = [entry.prompt for entry in reference.expected]
    for state in ("cold", "cached"):
        outputs = run_staggered(llm, prompts, GREEDY)
        names = get_differences(outputs, reference.expected)
        assert not names, f"{state}: {describe_differences(outputs, reference.expected)}"
    assert_nothing_is_left(llm)
    return f"{len(prompts)} prompts, cold and cached"


def describe_differences(outputs: Sequence[RequestOutput], expected: Sequence[Expected]) -> str:
    """Where tokens part, and how close the reference's choice was there."""
    lines = []
    for output, entry in zip(outputs, expected, strict=True):
        index = find_first_difference(output.outputs[0].token_ids, entry.token_ids)
        if index is not None:
            lines.append(
                f"{entry.case.name}: token {index}, margin {get_margins(entry.logits)[index]:.2g}"
            )
    return "; ".join(lines)


def find_first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((index for index, (a, b) in pairs if a != b), None)


def get_margins(logits: torch.Tensor) -> list[float]:
    """By how much each row's likeliest token leads."""
    best = logits.float().topk(2, dim=-1).values
    margins: list[float] = (best[:, 0] - best[:, 1]).tolist()
    return margins
