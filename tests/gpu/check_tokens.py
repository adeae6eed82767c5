"""Greedy float32 tokens equal those of `model.generate` on the same device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch

from sensorium import RequestOutput
from sensorium.worker.graphs import encoder_graphs
from sensorium.worker.graphs.recorder import CudaRecorder
from tests.parity.graph_mistakes import making_graph_mistake
from tests.parity.reference import GREEDY, Expected, get_differences
from tests.parity.stress import Stress
from tests.support.engine import assert_nothing_is_left, capture_encoders, run_staggered

from .setting import UnavailableError, get_device, get_reference, make_device_llm, need_cuda

# How a family is run: with graphs and fusions as by default, and without one or both of them.
SETTINGS: dict[str, dict[str, Any]] = {
    "budget 7": {"max_num_batched_tokens": 7},
    "budget 4096": {"max_num_batched_tokens": 4096},
    "eager": {"max_num_batched_tokens": 24, "enforce_eager": True},
    "not fused": {"max_num_batched_tokens": 24, "fusion": False},
    "eager, not fused": {"max_num_batched_tokens": 24, "enforce_eager": True, "fusion": False},
}


def check_float32(family: str, setting: str) -> str:
    reference = get_reference(family, torch.float32)
    llm = make_device_llm(family, torch.float32, **SETTINGS[setting])
    assert llm.config.attention_backend in ("triton", "torch")  # flash kernels have no float32
    prompts = [entry.prompt for entry in reference.expected]
    for state in ("cold", "cached"):
        outputs = run_staggered(llm, prompts, GREEDY)
        names = get_differences(outputs, reference.expected)
        assert not names, f"{state}: {describe_differences(outputs, reference.expected)}"
    assert_nothing_is_left(llm)
    return f"{len(prompts)} prompts; graphs: {llm.config.graphs}; fused: {llm.config.fused}"


def check_stress(family: str) -> str:
    """Random requests that are aborted, preempted and found in caches, within captured batches."""
    reference = get_reference(family, torch.float32)
    logging.getLogger("sensorium").setLevel(logging.WARNING)
    tally = Stress(reference, 0, device=get_device()).run()
    assert tally.differences == [], "\n".join(tally.differences)
    assert tally.num_preemptions
    assert tally.num_aborted_running
    return str(tally)


def check_encoder_graphs(family: str) -> str:
    """Check that encoders that are replayed from graphs lead to the same tokens.

    Every shape is captured when it first comes. With another salt everything is encoded again.
    """
    reference = get_reference(family, torch.float32)
    llm = make_device_llm(family, torch.float32)
    need_cuda()
    graphs = capture_encoders(llm, CudaRecorder(torch.device("cuda")))
    with patch.object(encoder_graphs, "NUM_BEFORE_CAPTURE", 0):
        for salt in "abc":
            for entry in reference.expected:
                prompt: Any = {**entry.prompt, "cache_salt": salt}
                outputs = llm.generate([prompt], GREEDY, use_tqdm=False)
                names = get_differences(outputs, [entry])
                assert not names, f"{salt}: {describe_differences(outputs, [entry])}"
    assert_nothing_is_left(llm)
    return f"{graphs.num_graphs} graphs; refused: {graphs._refusals or 'none'}"


def check_graph_mistake(mistake: str) -> str:
    reference = get_reference("llama", torch.float32)
    llm = make_device_llm("llama", torch.float32, max_num_batched_tokens=4096)
    if not llm.config.graphs.startswith("decoding in"):
        raise UnavailableError(llm.config.graphs)
    with making_graph_mistake(mistake):
        outputs = run_staggered(llm, [entry.prompt for entry in reference.expected], GREEDY)
    names = get_differences(outputs, reference.expected)
    assert names, "no comparison saw it"
    return f"seen in {len(names)} of {len(reference.expected)} prompts"


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
