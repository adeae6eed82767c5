"""Calls of processors that can't be called like the others, by `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sensorium.multimodal.processing.processor_call import ProcessorCall, ProcessorResult
from sensorium.types.errors import RequestError

_FRAMES_PER_EMBED = 8  # two by the encoder's convolution, four by its projector


def call_voxtral(
    processor: Any,
    modality: str,
    media: object,
    metadata: Mapping[str, object] | None,
    processor_kwargs: Mapping[str, object],
) -> ProcessorResult:
    """Process a sound with the parts of Voxtral's processor, which itself takes only conversations.

    Sounds are padded to whole windows of the encoder, which gives each window the same number of
    embeddings.
    """
    del modality, metadata  # sounds only
    if processor_kwargs:
        raise RequestError(f"Voxtral's processor has no options: {', '.join(processor_kwargs)}")
    extractor = processor.feature_extractor
    features = extractor(
        media,
        sampling_rate=extractor.sampling_rate,
        padding=True,
        truncation=False,
        pad_to_multiple_of=extractor.n_samples,
        return_tensors="pt",
    )["input_features"]
    windows = features.reshape(extractor.feature_size, -1, extractor.nb_max_frames).transpose(0, 1)
    num_embeds = len(windows) * extractor.nb_max_frames // _FRAMES_PER_EMBED
    return {"input_features": windows.contiguous()}, processor.audio_token * num_embeds


PROCESSOR_CALLS: dict[str, ProcessorCall] = {"voxtral": call_voxtral}
