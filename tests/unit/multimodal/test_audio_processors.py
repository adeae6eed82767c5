"""The audio features of encoder-decoder models, against Transformers' own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sensorium.models import ensure_torchvision
from sensorium.multimodal.processing.audio import AudioProcessor

ensure_torchvision()
import transformers as tf  # noqa: E402

RATE = 16_000


class CountingExtractor(tf.WhisperFeatureExtractor):
    """Whisper's extractor under another name: nothing is known of its silence."""


def make_processor(extractor: tf.WhisperFeatureExtractor) -> AudioProcessor:
    parts = SimpleNamespace(feature_extractor=extractor)
    return AudioProcessor(tf.WhisperForConditionalGeneration, tf.WhisperConfig(), parts)


def make_audio(num_samples: int, loudness: float = 0.1) -> np.ndarray:
    generator = np.random.default_rng(num_samples)
    return (loudness * generator.normal(0, 1, num_samples)).astype(np.float32)


@pytest.mark.parametrize("loudness", [0.0, 1e-4, 1.0])
@pytest.mark.parametrize(
    "num_samples", [1, 159, 200, 401, 15_999, 16_000, 100_003, 479_199, 479_201, 480_000, 480_001]
)
def test_features_equal_those_of_transformers(num_samples: int, loudness: float) -> None:
    extractor = tf.WhisperFeatureExtractor()
    audio = make_audio(num_samples, loudness)
    is_long = num_samples > 30 * RATE
    options = {"truncation": False, "padding": "longest"} if is_long else {}
    expected = extractor(audio, sampling_rate=RATE, return_tensors="pt", **options)
    item, layout = make_processor(extractor).process(audio)
    assert torch.equal(item["input_features"], expected.input_features)
    assert layout.num_embeds == 1500


@pytest.mark.parametrize(
    ("extractor", "is_cut"),
    [
        (tf.WhisperFeatureExtractor(), True),
        (tf.WhisperFeatureExtractor(dither=1e-3), False),
        (CountingExtractor(), False),
    ],
)
def test_padding_of_equal_silence_is_computed_once(
    extractor: tf.WhisperFeatureExtractor, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    extract = tf.WhisperFeatureExtractor._torch_extract_fbank_features

    def note_length(self, waveform: np.ndarray, device: str = "cpu") -> np.ndarray:
        lengths.append(waveform.shape[-1])
        return extract(self, waveform, device)

    monkeypatch.setattr(tf.WhisperFeatureExtractor, "_torch_extract_fbank_features", note_length)
    item, _ = make_processor(extractor).process(make_audio(RATE))
    assert item["input_features"].shape == (1, 80, 3000)
    assert (lengths[0] < 2 * RATE) == is_cut
