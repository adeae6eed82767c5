"""Silero's network in numpy is the one of its package, and finds voices."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from sensorium import embedded
from sensorium.speech.live import voices
from sensorium.speech.live.voices import FRAME, SileroDetector

# Name in the package's TorchScript -> the name of the same weight in its safetensors file.
NAMES = {
    "stft.forward_basis_buffer": "stft_conv.weight",
    **{
        f"encoder.{index}.reparam_conv.{kind}": f"conv{index + 1}.{kind}"
        for index in range(4)
        for kind in ("weight", "bias")
    },
    **{
        f"decoder.rnn.{kind}": f"lstm_cell.{kind}"
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    },
    "decoder.decoder.2.weight": "final_conv.weight",
    "decoder.decoder.2.bias": "final_conv.bias",
}


def load_script() -> torch.jit.ScriptModule:
    package = find_spec("silero_vad")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "data" / "silero_vad.jit"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
        return torch.jit.load(path, map_location="cpu")


def read_frames(path: Path) -> np.ndarray:
    resampler = av.AudioResampler("s16", "mono", 16_000)
    pieces = []
    with av.open(path) as container:
        for frame in container.decode(audio=0):
            pieces += [each.to_ndarray()[0] for each in resampler.resample(frame)]
    samples = np.concatenate(pieces).astype(np.float32) / 32768
    return samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)


@pytest.fixture
def speech() -> np.ndarray:
    return read_frames(Path(embedded.__file__).parent / "media" / "speech.flac")


def test_the_network_computes_what_the_package_does(
    monkeypatch: pytest.MonkeyPatch, speech: np.ndarray
) -> None:
    """The package's script has weights of another training, so its weights are used here."""
    script = load_script()
    weights = {
        name: script.state_dict()[f"_model.{theirs}"].numpy() for theirs, name in NAMES.items()
    }
    monkeypatch.setattr(voices, "_load_weights", lambda: weights)
    noise = np.random.default_rng(0).normal(0, 0.1, (20, FRAME)).astype(np.float32)
    frames = np.concatenate([speech, noise])
    expected = [script(torch.from_numpy(frame.copy()), 16_000).item() for frame in frames]
    detector = SileroDetector()
    found = [*detector.detect(frames[:5]), *detector.detect(frames[5:6]), *detector.detect([])]
    found += detector.detect(frames[6:])
    assert np.abs(np.array(found) - expected).max() < 1e-4


def test_speech_is_detected_and_other_audio_is_not(speech: np.ndarray) -> None:
    likely = SileroDetector().detect(speech)
    assert np.mean(np.array(likely) > 0.5) > 0.7
    rng = np.random.default_rng(0)
    times = np.arange(100 * FRAME) / 16_000
    for audio in (
        np.zeros(100 * FRAME),
        rng.normal(0, 0.05, 100 * FRAME),
        0.3 * np.sin(2 * np.pi * 440 * times),
    ):
        frames = audio.astype(np.float32).reshape(-1, FRAME)
        assert max(SileroDetector().detect(frames)) < 0.5


def test_torch_keeps_its_number_of_threads() -> None:
    before = torch.get_num_threads()
    SileroDetector().detect(np.zeros((1, FRAME), np.float32))
    assert torch.get_num_threads() == before
