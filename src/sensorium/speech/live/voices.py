"""Finds how likely each frame of audio has a voice: Silero's network, computed with numpy.

The package `silero-vad` has the weights. Its own code is not imported: that would set the number of
torch's threads for the whole process. Its speed is in `docs/adr/0040-realtime.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors.numpy import load_file

from sensorium.types.errors import SensoriumError
from sensorium.utils.silences import Samples

FRAME = 512  # samples at 16 kHz
_WEIGHTS = Path("data", "silero_vad_16k.safetensors")
_CONTEXT = 64  # samples of the frame before that the network also sees
_PADDING = 64
_WINDOW, _HOP = 256, 128  # of the Fourier transform
_NUM_WINDOWS = (_CONTEXT + FRAME + _PADDING - _WINDOW) // _HOP + 1
# The samples of each window, as (number of windows, 256).
_PLACES = _HOP * np.arange(_NUM_WINDOWS)[:, None] + np.arange(_WINDOW)
_NUM_STATES = 128


class VoiceDetector(Protocol):
    """A detector that goes through one stream of audio from its beginning."""

    def detect(self, frames: Samples) -> Sequence[float]:
        """Return how likely each frame has a voice, from 0 to 1, for an array [frames, 512]."""
        ...


class SileroDetector:
    """A detector with Silero's network, which has a state for one stream of audio."""

    def __init__(self) -> None:
        self._weights = _load_weights()
        self._context = np.zeros(_CONTEXT, np.float32)
        self._hidden = np.zeros(_NUM_STATES, np.float32)
        self._cell = np.zeros(_NUM_STATES, np.float32)

    def detect(self, frames: Samples) -> Sequence[float]:
        if not len(frames):
            return []
        ends = frames[:, -_CONTEXT:]
        before = np.concatenate([self._context[None], ends[:-1]])
        self._context = ends[-1].copy()
        features = self._encode(np.concatenate([before, frames], axis=1))
        weights = self._weights
        inputs = features @ weights["lstm_cell.weight_ih"].T + weights["lstm_cell.bias_ih"]
        hidden = np.stack([self._step(each) for each in inputs])
        logits = np.maximum(hidden, 0.0) @ weights["final_conv.weight"][0, :, 0]
        return [float(each) for each in _sigmoid(logits + weights["final_conv.bias"][0])]

    def _encode(self, audios: Samples) -> Samples:
        """Return the features [frames, 128] of frames with their contexts."""
        # numpy's own functions for padding and windows take longer than the network itself.
        mirrored = audios[:, -2 : -2 - _PADDING : -1]
        windows = np.concatenate([audios, mirrored], axis=1)[:, _PLACES]
        waves = windows @ self._weights["stft_conv.weight"][:, 0].T
        num_bins = _WINDOW // 2 + 1
        found: Samples = np.sqrt(waves[..., :num_bins] ** 2 + waves[..., num_bins:] ** 2)
        for name, stride in (("conv1", 1), ("conv2", 2), ("conv3", 2), ("conv4", 1)):
            found = self._convolve(found, name, stride)
        return found[:, 0]

    def _convolve(self, found: Samples, name: str, stride: int) -> Samples:
        """Return a convolution over three steps, and its ReLU, as [frame, step, size]."""
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        num_steps = found.shape[1]
        padded = np.zeros((len(found), num_steps + 2, found.shape[2]), np.float32)
        padded[:, 1:-1] = found
        places = [padded[:, start : start + num_steps : stride] for start in range(3)]
        windows = np.stack(places, axis=-1)
        flat = windows.reshape(*windows.shape[:2], -1)  # (frame, step, size * 3)
        made: Samples = np.maximum(flat @ weight.reshape(len(weight), -1).T + bias, 0.0)
        return made

    def _step(self, inputs: Samples) -> Samples:
        """Return the next hidden state of the LSTM. Its gates are i, f, g and o, in this order."""
        weights = self._weights
        gates = inputs + weights["lstm_cell.weight_hh"] @ self._hidden
        gates += weights["lstm_cell.bias_hh"]
        taken, kept, new, shown = gates.reshape(4, _NUM_STATES)
        self._cell = _sigmoid(kept) * self._cell + _sigmoid(taken) * np.tanh(new)
        self._hidden = _sigmoid(shown) * np.tanh(self._cell)
        return self._hidden


def _sigmoid(values: Samples) -> Samples:
    made: Samples = 0.5 * (1.0 + np.tanh(0.5 * values))
    return made


@cache
def _load_weights() -> dict[str, Samples]:
    package = find_spec("silero_vad")
    for folder in (package and package.submodule_search_locations) or ():
        return load_file(Path(folder) / _WEIGHTS)
    raise SensoriumError("the package silero-vad, which detects voices, is not installed")
