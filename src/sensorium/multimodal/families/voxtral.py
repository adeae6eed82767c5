"""Voxtral: its processor takes sounds in whole conversations only, so its parts are called here.

Sounds are padded to whole windows of the encoder, which gives each window the same number of
embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sensorium.multimodal.processor_call import ProcessorResult
from sensorium.types.errors import RequestError

_FRAMES_PER_EMBED = 8  # two by the encoder's convolution, four by its projector


def call_voxtral(
    processor: Any,
    modality: str,
    media: object,
    metadata: Mapping[str, object] | None,
    processor_kwargs: Mapping[str, object],
) -> ProcessorResult:
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
