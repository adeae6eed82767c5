"""Audio that changes every 80 ms, and its transcript by Transformers' `generate`."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from sensorium.utils.silences import Samples

RATE = 16_000
TOKEN = 1280  # samples
DEFAULT_DELAY_MS = 480


def make_tones(seed: int, seconds: float) -> Samples:
    """Return audio of three random tones at a time, in steps of 16 bits as a file has them."""
    generator = np.random.default_rng(seed)
    times = np.arange(TOKEN) / RATE
    parts = []
    for _ in range(int(seconds * RATE) // TOKEN + 1):
        pitches = generator.uniform(80, 7000, (3, 1))
        loudness = 10 ** generator.uniform(-3, -0.9, (3, 1))
        parts.append((loudness * np.sin(2 * np.pi * pitches * times)).sum(0))
    samples = np.concatenate(parts)[: int(seconds * RATE)]
    return np.rint(samples * 32767).astype(np.float32) / 32768


class StreamedReference:
    """A Voxtral-Realtime of Transformers, with processors for several delays."""

    def __init__(self, directory: str, folder: Path) -> None:
        self._directory = Path(directory)
        self._folder = folder
        model: Any = transformers.VoxtralRealtimeForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32
        )
        self._model = model.eval()
        self._processors: dict[int, Any] = {}

    def _get_processor(self, delay_ms: int) -> Any:
        if delay_ms not in self._processors:
            copy = self._folder / f"delay-{delay_ms}"
            shutil.copytree(self._directory, copy, ignore=shutil.ignore_patterns("*.safetensors"))
            tekken = json.loads((copy / "tekken.json").read_text())
            tekken["audio"]["transcription_delay_ms"] = float(delay_ms)
            (copy / "tekken.json").write_text(json.dumps(tekken))
            self._processors[delay_ms] = transformers.AutoProcessor.from_pretrained(copy)
        return self._processors[delay_ms]

    @torch.inference_mode()
    def generate(self, audio: Samples, delay_ms: int = DEFAULT_DELAY_MS) -> list[int]:
        """Return the tokens behind the prompt."""
        processor = self._get_processor(delay_ms)
        inputs = processor(audio, sampling_rate=RATE, return_tensors="pt")
        with warnings.catch_warnings():
            # It is as long as the audio, which Transformers uses as a length by default.
            warnings.filterwarnings("ignore", "Using the model-agnostic default")
            output = self._model.generate(**inputs, do_sample=False)[0].tolist()
        token_ids: list[int] = output[inputs["input_ids"].shape[1] :]
        return token_ids

    def decode(self, token_ids: list[int]) -> str:
        processor = self._get_processor(DEFAULT_DELAY_MS)
        return str(processor.tokenizer.decode(token_ids, skip_special_tokens=True)).strip()
