"""Computes the features of a sound while it goes on, part by part.

The parts joined are the features of the whole sound, as the model's processor computes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Samples = npt.NDArray[np.float32]


class SoundStreamSpec:
    """How a model hears a sound that goes on: silence around it, delays, and its features."""

    def __init__(self, processor: Any) -> None:
        config = processor.mistral_common_audio_config
        self._extractor = processor.feature_extractor
        self._encoder = processor.tokenizer.tokenizer.instruct_tokenizer.audio_encoder
        self._start_ids = tuple(processor.tokenizer.tokenizer.instruct_tokenizer.start())
        self.sampling_rate = int(config.sampling_rate)
        self.samples_per_token = int(config.raw_audio_length_per_tok)
        self.frame_ms = float(config.frame_duration_ms)
        self.default_delay_ms = float(config.transcription_delay_ms)

    def count_delay_tokens(self, delay_ms: float | None = None) -> int:
        return int(self._encoder.audio_config.get_num_delay_tokens(delay_ms))

    def make_prompt(self, delay_ms: float | None = None) -> tuple[int, ...]:
        """Return the tokens with which a stream begins."""
        return (*self._start_ids, *self._encoder.encode_streaming_tokens(delay_ms))

    def make_padding(self, delay_ms: float | None = None) -> tuple[int, int]:
        """Return the samples of silence before a sound, and behind one of whole tokens."""
        left, right = self._encoder.get_padding_audio(delay_ms)
        return len(left.audio_array), len(right.audio_array)

    def compute(self, samples: Samples) -> torch.Tensor:
        """Return the features [bins, frames] of samples, without padding them."""
        features: torch.Tensor = self._extractor(
            samples, sampling_rate=self.sampling_rate, return_tensors="pt", center=False
        )["input_features"][0]
        return features

    @property
    def window(self) -> int:
        """The number of samples that one frame of the features is computed from."""
        return int(self._extractor.n_fft)


class SoundStream:
    """The features of one sound that goes on."""

    def __init__(self, spec: SoundStreamSpec, delay_ms: float | None = None) -> None:
        self._spec = spec
        left, self._num_behind = spec.make_padding(delay_ms)
        # A frame looks back for half of its window, also the first one.
        self._rest: Samples = np.zeros(spec.window // 2 + left, np.float32)
        self._num_samples = 0
        self._is_closed = False

    def append(self, samples: Samples) -> torch.Tensor | None:
        """Return the features of all tokens that are complete with these samples, if any are."""
        self._num_samples += len(samples)
        return self._take(samples)

    def close(self) -> torch.Tensor | None:
        """End the sound with silence, and return the features that are left."""
        missing = -self._num_samples % self._spec.samples_per_token
        silence = missing + self._num_behind + self._spec.window // 2
        return self._take(np.zeros(silence, np.float32))

    def _take(self, samples: Samples) -> torch.Tensor | None:
        spec = self._spec
        self._rest = np.concatenate((self._rest, samples))
        num_tokens = (len(self._rest) - spec.window) // spec.samples_per_token
        if num_tokens < 1:
            return None
        used = num_tokens * spec.samples_per_token
        features = spec.compute(self._rest[: used + spec.window])
        self._rest = self._rest[used:].copy()
        return features
