"""Prepares audio for models that attend to it outside the prompt (encoder-decoder models).

No token of a prompt stands for such audio. If it fits into the model's window, it becomes the input
of the encoder. Of longer audio all features are computed, and windows are cut out of them later
(see `sensorium.speech`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig, WhisperFeatureExtractor

from sensorium.models.encoder_decoder import count_positions, get_max_positions
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem

Samples = npt.NDArray[np.float32]
NUM_SAMPLES = "num_samples"  # a tensor of an item, with the length of its audio without padding


class AudioProcessor:
    """The audio processor of an encoder-decoder model; `parts` has its feature extractor."""

    def __init__(self, model_class: Any, config: PretrainedConfig, parts: Any) -> None:
        extractor = parts.feature_extractor
        self._model_class = model_class
        self._extractor = extractor
        self.sampling_rate = int(extractor.sampling_rate)
        self.samples_per_frame = int(getattr(extractor, "hop_length", 1))
        (self.input_name,) = extractor.model_input_names[:1]
        # The frames of a window, which shorter audio is padded to. None: audio is not padded.
        self._num_window_frames: int | None = getattr(extractor, "nb_max_frames", None)
        # True for Whisper, unless it adds noise: every frame of silence has the same features.
        self._is_silence_even = type(extractor) is WhisperFeatureExtractor and not extractor.dither
        self.max_positions = get_max_positions(model_class, config)
        # With these tokens the decoder begins if a prompt has none.
        self.start_token_ids: tuple[int, ...] = (int(config.decoder_start_token_id),)

    def process(self, audio: Samples) -> tuple[MultiModalKwargsItem, ItemLayout]:
        """Return the encoder's inputs for audio, and a layout with the number of its positions.

        Raise `RequestError` if the audio is too short for the encoder.
        """
        tensors = self._make_item(self._compute_features(audio), len(audio))
        num_positions = self.count_positions(tensors)
        if num_positions < 1:
            raise RequestError("this audio is too short: the model takes nothing of it")
        return tensors, ItemLayout(text="", token_id=0, num_embeds=num_positions)

    def _compute_features(self, audio: Samples) -> torch.Tensor:
        """Return the features of the whole audio, padded to a window if it is shorter."""
        options: dict[str, Any] = {"sampling_rate": self.sampling_rate, "return_tensors": "pt"}
        num_frames = self._num_window_frames
        if num_frames is None:
            return self._run_extractor(audio, options)
        window = num_frames * self.samples_per_frame
        whole = options | {"truncation": False, "padding": "longest"}
        if len(audio) > window:
            return self._run_extractor(audio, whole)
        if self._is_silence_even:
            # Most of the time would go into the silence behind short audio. So features are
            # computed only up to the first frames of silence, and the last of them is repeated.
            hop = self.samples_per_frame
            size = (len(audio) + 2 * self._extractor.n_fft) // hop * hop
            if size < window:
                features = self._run_extractor(np.pad(audio, (0, size - len(audio))), whole)
                num_missing = num_frames - features.shape[-1]
                return torch.nn.functional.pad(features, (0, num_missing), mode="replicate")
        return self._run_extractor(audio, options)

    def _run_extractor(self, audio: Samples, options: dict[str, Any]) -> torch.Tensor:
        features: torch.Tensor = self._extractor(audio, **options)[self.input_name]
        return features

    def _make_item(self, features: torch.Tensor, num_samples: int) -> MultiModalKwargsItem:
        return {self.input_name: features, NUM_SAMPLES: torch.tensor([num_samples])}

    def count_positions(self, item: MultiModalKwargsItem) -> int:
        """Return how many positions an item has after the encoder."""
        return count_positions(self._model_class, item[self.input_name].shape[-1])

    def cut_window(
        self, item: MultiModalKwargsItem, first_frame: int, num_frames: int
    ) -> MultiModalKwargsItem:
        """Return an item for `num_frames` frames from `first_frame` on, cut out of a whole audio.

        If the model needs windows of a fixed length, missing frames at the end are zeros, as in
        Transformers. But short audio was already padded, and keeps the features of its padding.
        """
        size = self._num_window_frames or num_frames
        window = item[self.input_name][..., first_frame : first_frame + size]
        window = torch.nn.functional.pad(window, (0, size - window.shape[-1]))
        return self._make_item(window.contiguous(), num_frames * self.samples_per_frame)

    def check_layout(self, layout: ItemLayout) -> None:
        """Raise `RequestError` if no audio of this model can have the given layout."""
        if layout.text or not 0 < layout.num_embeds <= self.max_positions:
            raise RequestError(
                "the layout of audio must have no text for this model, and from 1 to "
                f"{self.max_positions} embeddings, not {layout.num_embeds}"
            )
