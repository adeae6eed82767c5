"""What a decoder is called with, by Transformers and by the engine. No pytest here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sensorium import LLM
from tests.parity.reference import GREEDY, Expected, Reference
from tests.support.engine import get_hf_model


@torch.inference_mode()
def get_decoder_inputs(reference: Reference, entry: Expected, *, step: int = 0) -> dict[str, Any]:
    """Return the keyword arguments with which the untouched model calls its decoder.

    They are those for the prompt, or for the n-th token behind it.
    """
    seen: list[dict[str, Any]] = []
    handle = reference.model.get_decoder().register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs), with_kwargs=True
    )
    if hasattr(reference.model.base_model, "rope_deltas"):
        reference.model.base_model.rope_deltas = None
    try:
        reference.model.generate(**entry.inputs, max_new_tokens=step + 1, do_sample=False)
    finally:
        handle.remove()
    given = seen[step]
    if given.get("inputs_embeds") is None and step == 0:  # a model for text embeds in its decoder
        embedding = reference.model.get_input_embeddings()
        return {**given, "inputs_embeds": embedding(entry.inputs["input_ids"])}
    return given


def get_our_decoder_inputs(
    llm: LLM, entry: Expected
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    hf_model = get_hf_model(llm)
    forward, seen = hf_model.forward, []

    def forward_and_note(embeds: Any, positions: Any, call: Any, extra: Any) -> torch.Tensor:
        seen.append((embeds.clone(), positions.clone(), extra))
        result: torch.Tensor = forward(embeds, positions, call, extra)
        return result

    hf_model.forward = forward_and_note
    try:
        llm.generate(entry.prompt, replace(GREEDY, max_tokens=1), use_tqdm=False)
    finally:
        hf_model.forward = forward
    return seen[0]
