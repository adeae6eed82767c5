"""Prepares audio for streaming models, which take it while it arrives, as Voxtral-Realtime does.

Every position of such a model has a token and a part of the audio. A whole file is prepared by the
model's own processor. For streaming audio, features are computed as it arrives; joined, they are
the features of the whole audio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from sensorium.multimodal.processing.audio import NUM_SAMPLES, AudioProcessor, Samples
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ItemLayout, MultiModalFeatureSpec, MultiModalKwargsItem
from sensorium.types.request import StreamSpec

_MAX_POSITIONS = 2**31 - 1  # audio may have any length
_MS_PER_S = 1000
_MAX_DELAY_TOKENS = 30  # the longest delay that the model was trained for: 2.4 seconds


class StreamingAudioProcessor(AudioProcessor):
    """The audio processor of a streaming model; `parts` is the processor of Transformers."""

    def __init__(self, model_class: Any, config: PretrainedConfig, parts: Any) -> None:
        del model_class
        audio = parts.mistral_common_audio_config
        instruct = parts.tokenizer.tokenizer.instruct_tokenizer
        self._parts = parts
        self._extractor = parts.feature_extractor
        self._audio = instruct.audio_encoder
        self._begin_ids = tuple(int(token_id) for token_id in instruct.start())
        self.sampling_rate = int(audio.sampling_rate)
        self.samples_per_frame = int(self._extractor.hop_length)
        self.samples_per_token = int(audio.raw_audio_length_per_tok)
        self.frames_per_token = int(config.audio_length_per_tok)
        self.window = int(self._extractor.n_fft)  # samples that one frame is computed from
        self.input_name = "input_features"
        self.max_positions = _MAX_POSITIONS
        self.start_token_ids = self.make_prompt(self.default_delay_ms)

    @property
    def token_ms(self) -> int:
        """Return the length of audio for one token, in milliseconds."""
        return _MS_PER_S * self.samples_per_token // self.sampling_rate

    @property
    def default_delay_ms(self) -> int:
        return self.token_ms * int(self._parts.num_delay_tokens)

    def count_delay_tokens(self, delay_ms: int) -> int:
        """Return by how many tokens the text is behind the audio; refuse an impossible delay."""
        count, rest = divmod(delay_ms, self.token_ms)
        if rest or not 1 <= count <= _MAX_DELAY_TOKENS:
            least, most = self.token_ms, _MAX_DELAY_TOKENS * self.token_ms
            raise RequestError(
                f"the delay of this model is a multiple of {least} ms, from {least} to {most} ms, "
                f"not {delay_ms} ms"
            )
        return count

    def make_prompt(self, delay_ms: int) -> tuple[int, ...]:
        """Return the prompt for streaming audio, which depends on the delay of the text."""
        return (*self._begin_ids, *map(int, self._audio.encode_streaming_tokens(delay_ms)))

    def make_padding(self, delay_ms: int) -> tuple[int, int]:
        """Return how many samples of silence the model needs before and behind the audio.

        The second number is for audio that ends at the end of a token.
        """
        left, right = self._audio.get_padding_audio(delay_ms)
        return len(left.audio_array), len(right.audio_array)

    def process(self, audio: Samples) -> tuple[MultiModalKwargsItem, ItemLayout]:
        """Return the features of the whole audio, and a layout with the number of its positions."""
        features = self._parts(audio, return_tensors="pt")[self.input_name]
        tensors = self._make_item(features, len(audio))
        num_positions = self.count_positions(tensors)
        if num_positions <= len(self.start_token_ids):
            raise RequestError("this audio is too short: the model takes nothing of it")
        return tensors, ItemLayout(text="", token_id=0, num_embeds=num_positions)

    def count_positions(self, item: MultiModalKwargsItem) -> int:
        return int(item[self.input_name].shape[-1]) // self.frames_per_token

    def cut_window(
        self, item: MultiModalKwargsItem, first_frame: int, num_frames: int
    ) -> MultiModalKwargsItem:
        """Return the item itself: its only window is the whole audio."""
        del first_frame, num_frames
        return {name: item[name] for name in (self.input_name, NUM_SAMPLES)}

    def describe_whole(self, features: Sequence[MultiModalFeatureSpec]) -> StreamSpec:
        """Return the `StreamSpec` for a request that comes with its whole audio."""
        return StreamSpec(
            num_delay_tokens=self.count_delay_tokens(self.default_delay_ms),
            num_received=sum(feature.mm_position.get_num_embeds() for feature in features),
            is_open=False,
        )

    def compute(self, samples: Samples) -> torch.Tensor:
        """Return the features [bins, frames] of samples, without padding them."""
        features: torch.Tensor = self._extractor(
            samples, sampling_rate=self.sampling_rate, return_tensors="pt", center=False
        )[self.input_name][0]
        return features


class AudioStream:
    """The features of streaming audio, computed as its samples arrive."""

    def __init__(self, audios: StreamingAudioProcessor, delay_ms: int) -> None:
        self._audios = audios
        left, self._num_behind = audios.make_padding(delay_ms)
        # A frame is computed from samples on both sides: half a window of silence for the first.
        self._rest: Samples = np.zeros(audios.window // 2 + left, np.float32)
        self._num_samples = 0

    def append(self, samples: Samples) -> torch.Tensor | None:
        """Return the features of the tokens that these samples complete, or `None` without any."""
        self._num_samples += len(samples)
        return self._take(samples)

    def close(self) -> torch.Tensor | None:
        """End the audio with silence, and return the remaining features, or `None` without any."""
        missing = -self._num_samples % self._audios.samples_per_token
        silence = missing + self._num_behind + self._audios.window // 2
        return self._take(np.zeros(silence, np.float32))

    def count_positions(self, features: torch.Tensor) -> int:
        """Return how many decoder positions the given audio features take up."""
        return int(features.shape[-1]) // self._audios.frames_per_token

    def _take(self, samples: Samples) -> torch.Tensor | None:
        size, window = self._audios.samples_per_token, self._audios.window
        self._rest = np.concatenate((self._rest, samples))
        num_tokens = (len(self._rest) - window) // size
        if num_tokens < 1:
            return None
        used = num_tokens * size
        features = self._audios.compute(self._rest[: used + window])
        self._rest = self._rest[used:].copy()
        return features
