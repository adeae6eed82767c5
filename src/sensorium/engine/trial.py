"""Tries a model of an unknown family on small prompts: the engine and the model on its own must
agree.

The generic adapter asks a model for what it needs, but can't ask for what it doesn't know: a mask
that is neither causal nor a window, or another input that the decoder gets with a picture. Such a
model would run and give wrong tokens. The families in the catalog are compared by tests instead.
"""

from __future__ import annotations

import logging

import torch

from sensorium.engine.engine_core import EngineCore
from sensorium.engine.input_processor import InputProcessor
from sensorium.models.adapter import ModelAdapter
from sensorium.multimodal.dummy_media import make_dummy_media
from sensorium.multimodal.perceiver import Perceiver
from sensorium.multimodal.processor import MultiModalProcessor
from sensorium.types.errors import ModelError
from sensorium.types.prompts import Prompt
from sensorium.types.sampling import MAX_LOGPROBS, GenerationDefaults, SamplingParams
from sensorium.types.transfer import Transfer

logger = logging.getLogger(__name__)
_TEXT = "What is this? Look and listen, then say it in a few words."
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, logprobs=MAX_LOGPROBS, ignore_eos=True)
# How far log-probabilities may lie apart: rounding in another order, not another computation.
_TOLERANCES = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.5}


def run_trial(
    core: EngineCore, adapter: ModelAdapter, processor: MultiModalProcessor, perceiver: Perceiver
) -> None:
    """A `ModelError` if the model alone says something else than the engine. `perceiver` must give
    tensors: one that leads to no core.
    """
    name = type(adapter.model).__name__
    for modality in (None, *processor.modalities):
        subject = "text" if modality is None else f"text with {modality}"
        try:
            difference = _compare(core, adapter, processor, perceiver, modality)
        except Exception as error:  # a model that is not known may raise anything
            reason = f"a trial of {subject} failed: {error}"
            raise ModelError(f"{name} can't be run: {reason}") from error
        logger.info("trial of %s: log-probabilities differ by %.2g", subject, difference)
        if not difference <= _TOLERANCES[adapter.dtype]:
            raise ModelError(
                f"{name} can't be run: in a trial of {subject} the model on its own computed "
                f"something else (log-probabilities differ by {difference:.2g}): it does more "
                "between its encoders and its logits than is known here"
            )


def _compare(
    core: EngineCore,
    adapter: ModelAdapter,
    processor: MultiModalProcessor,
    perceiver: Perceiver,
    modality: str | None,
) -> float:
    """The largest difference among the likeliest next tokens."""
    media = None if modality is None else make_dummy_media(modality, processor.sampling_rate or 0)
    text = processor.make_trial_text(modality, _TEXT)
    prompt: Prompt = {"prompt": text}
    if modality is not None:
        prompt = {"prompt": text, "multi_modal_data": {modality: [media]}}
    inputs = InputProcessor(
        processor,
        perceiver=perceiver,
        defaults=GenerationDefaults(),
        limit_mm_per_prompt={},
        seed=0,
    )
    processed = inputs.process(f"trial-{modality}", prompt, _PARAMS)
    tensors = {item.handle.mm_hash: item.handle.kwargs or {} for item in processed.items}
    core.add_request(processed.request, Transfer(payloads=tensors))
    while core.has_requests:
        for output in core.step():
            if output.error is not None:
                raise ModelError(output.error)
            (ours,) = output.logprobs
    whole = processor.call_whole(text, modality, media)
    if whole["input_ids"][0].tolist() != list(processed.request.prompt_token_ids):
        raise ModelError("its processor makes another prompt of it")
    theirs = adapter.run_whole(whole)
    expected = theirs[list(ours.top_token_ids)].tolist()
    pairs = zip(ours.top_logprobs, expected, strict=True)
    return float(max(abs(mine - other) for mine, other in pairs))
