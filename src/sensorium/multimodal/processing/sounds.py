"""Prepares sounds for models that attend to them beside their prompt (encoder-decoder models).

No token of a prompt stands for such a sound. A sound that fits into the model's window becomes the
input of its encoder. Of a longer one, the features of the whole sound are computed: windows are cut
out of them later (see `sensorium.speech`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig

from sensorium.models.encoder_decoder import count_positions, get_max_positions
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem

Samples = npt.NDArray[np.float32]


class SoundProcessor:
    """The processor of an encoder-decoder model for sounds, with the model's feature extractor."""

    def __init__(self, model_class: Any, config: PretrainedConfig, extractor: Any) -> None:
        self._model_class = model_class
        self._extractor = extractor
        self.max_positions = get_max_positions(model_class, config)
        # With these tokens the decoder begins if a prompt has none.
        self.start_token_ids: tuple[int, ...] = (int(config.decoder_start_token_id),)

    def process(self, sound: Samples) -> tuple[MultiModalKwargsItem, ItemLayout]:
        """Return the encoder's inputs for a sound, and a layout with the number of its positions.

        Raise `RequestError` if the sound is too short for the encoder.
        """
        extractor = self._extractor
        options: dict[str, Any] = {"sampling_rate": extractor.sampling_rate, "return_tensors": "pt"}
        if len(sound) > getattr(extractor, "n_samples", len(sound)):  # longer than a window
            options |= {"truncation": False, "padding": "longest"}
        output = extractor(sound, **options)
        (name,) = extractor.model_input_names[:1]
        features: torch.Tensor = output[name]
        num_positions = count_positions(self._model_class, features.shape[-1])
        if num_positions < 1:
            raise RequestError("this sound is too short: the model hears nothing of it")
        return {name: features}, ItemLayout(text="", token_id=0, num_embeds=num_positions)

    def check_layout(self, layout: ItemLayout) -> None:
        """Raise `RequestError` if no sound of this model can have the given layout."""
        if layout.text or not 0 < layout.num_embeds <= self.max_positions:
            raise RequestError(
                "the layout of a sound must have no text for this model, and from 1 to "
                f"{self.max_positions} embeddings, not {layout.num_embeds}"
            )
