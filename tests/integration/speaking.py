"""Audio, with the words in some of it, and small Whispers for tests that transcribe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import av
import numpy as np
from safetensors.torch import load_file, save_file

from sensorium import embedded
from sensorium.utils.silences import Samples
from tests.parity.cases import make_audio
from tests.support.media import write_audio
from tests.support.talking import QUIET, RATE, make_tones

SHORT_S = 2.5  # the model's windows have 3 s
_END_FACTOR = 6.0  # makes texts of a few tokens instead of all that a window has room for

MEDIA = Path(embedded.__file__).parent / "media"
# Samples of the embedded model -> what it transcribes them to.
WORDS = {"speech": "seven green birds", "question": "what color is the square"}


def make_wav(seconds: float = SHORT_S, *, seed: int = 0) -> bytes:
    return write_audio(make_audio(seconds, seed=seed), "WAV", "PCM_16")


def make_brief(source: str, directory: Path) -> Path:
    """Make a copy of a tiny Whisper that ends its texts soon, and accepts its first attempts.

    Otherwise each window takes the six attempts of a text that is too unlikely, of 90 tokens each.
    """
    shutil.copytree(source, directory)
    weights = load_file(directory / "model.safetensors")
    end = json.loads((directory / "config.json").read_text())["eos_token_id"]
    weights["proj_out.weight"][end] *= _END_FACTOR
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "generation_config.json"
    accepting = {"logprob_threshold": -1e3, "compression_ratio_threshold": 1e3}
    path.write_text(json.dumps({**json.loads(path.read_text()), **accepting}))
    return directory


def read_sample(name: str, rate: int = RATE) -> Samples:
    resampler = av.AudioResampler("s16", "mono", rate)
    pieces = []
    with av.open(MEDIA / f"{name}.flac") as container:
        for frame in container.decode(audio=0):
            pieces += [each.to_ndarray()[0] for each in resampler.resample(frame)]
    return np.concatenate(pieces).astype(np.float32) / 32768


def speak(*names: str, rate: int = RATE) -> Samples:
    """Return samples of the embedded model, with a second of silence around each."""
    silence = make_tones((QUIET, 1.0), rate=rate)
    return np.concatenate([silence, *(x for n in names for x in (read_sample(n, rate), silence))])
