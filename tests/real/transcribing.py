"""Transcripts by Transformers, with which those of an engine are compared, and a long speech.

All in float32 on the CPU, from the files of a Whisper checkpoint. Audio is samples at 16 kHz.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from real_models.speech import RATE
from sensorium.models import ensure_torchvision
from tests.real.hearing import Samples, read_samples

ensure_torchvision()

import transformers as tf  # noqa: E402  (after the shim)

LONG_S = 600.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A word, a sentence or a segment, with its times in seconds from the audio's beginning."""

    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LongSpeech:
    """Recordings one after another, with pauses between them."""

    samples: Samples
    sentences: tuple[Span, ...]  # what is said, and when each recording begins and ends

    @property
    def words(self) -> str:
        return " ".join(sentence.text for sentence in self.sentences)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTranscript:
    """What Transformers makes of audio of any length."""

    text: str
    token_ids: tuple[int, ...]  # with times, without special tokens
    segments: tuple[Span, ...]


class Transcriber:
    """Transformers' pipeline for speech recognition, and its model.

    Beams are off: the pipeline has five of them unless it is asked for fewer.
    """

    def __init__(self, directory: Path) -> None:
        self.pipeline = tf.pipeline(
            "automatic-speech-recognition",
            model=str(directory),
            device="cpu",
            dtype=torch.float32,
            # The times of words are read from attention weights, which only this one returns.
            model_kwargs={"attn_implementation": "eager"},
        )
        self.model: Any = self.pipeline.model
        self.tokenizer: Any = self.pipeline.tokenizer
        self.extractor: Any = self.pipeline.feature_extractor

    def transcribe(self, samples: Samples, *, num_beams: int = 1) -> str:
        """Return the text of at most 30 seconds, by the pipeline."""
        return str(self._run(samples, num_beams=num_beams)["text"])

    def time_words(self, samples: Samples) -> list[Span]:
        """Return the words of at most 30 seconds with their times, by the pipeline."""
        found = self._run(samples, num_beams=1, return_timestamps="word")
        return [_make_span(word["text"], *word["timestamp"]) for word in found["chunks"]]

    def _run(self, samples: Samples, *, num_beams: int, **options: Any) -> dict[str, Any]:
        result: dict[str, Any] = self.pipeline(
            {"raw": samples, "sampling_rate": RATE},
            generate_kwargs={"num_beams": num_beams},
            **options,
        )
        return result

    @torch.inference_mode()
    def generate(self, samples: Samples, **options: Any) -> list[int]:
        """Return the tokens of at most 30 seconds, by the model itself, without special tokens."""
        audio = self.extractor(samples, sampling_rate=RATE, return_tensors="pt")
        tokens = self.model.generate(audio.input_features, **options)
        return self._leave_out_special_tokens(tokens[0])

    @torch.inference_mode()
    def transcribe_long(self, samples: Samples, *, is_conditioned: bool) -> LongTranscript:
        """Transcribe audio of any length, window by window, at temperature 0.

        Each window begins where the last one's final time is. Conditioned, it also gets the text
        before it as a prompt. No window is decoded a second time.
        """
        audio = self.extractor(
            samples,
            sampling_rate=RATE,
            return_tensors="pt",
            truncation=False,
            padding="longest",
            return_attention_mask=True,
        )
        found = self.model.generate(
            **audio,
            return_timestamps=True,
            return_segments=True,
            condition_on_prev_tokens=is_conditioned,
            temperature=0.0,
        )
        token_ids = self._leave_out_special_tokens(found["sequences"][0])
        segments = [
            _make_span(self.read(segment["tokens"]), segment["start"], segment["end"])
            for segment in found["segments"][0]
        ]
        return LongTranscript(
            text=self.read(token_ids), token_ids=tuple(token_ids), segments=tuple(segments)
        )

    def read(self, token_ids: Sequence[int] | torch.Tensor) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _leave_out_special_tokens(self, token_ids: torch.Tensor) -> list[int]:
        special = {*self.tokenizer.all_special_ids}
        return [token for token in token_ids.tolist() if token not in special]


def _make_span(text: str, start_s: Any, end_s: Any) -> Span:
    return Span(text=text, start_s=round(float(start_s), 2), end_s=round(float(end_s), 2))


def make_long_speech(recordings: Mapping[Path, str], duration_s: float = LONG_S) -> LongSpeech:
    """Join the recordings again and again, each time in another order, which never changes.

    What the last one leaves of the time is silence.
    """
    generator = random.Random(0)  # the same each time
    audios = {path: read_samples(path) for path in recordings}
    samples = np.zeros(int(duration_s * RATE), np.float32)
    sentences: list[Span] = []
    position, queue = 0, list[Path]()
    while True:
        queue = queue or generator.sample(list(audios), len(audios))
        path = queue.pop()
        end = position + len(audios[path])
        if end > len(samples):
            return LongSpeech(samples=samples, sentences=tuple(sentences))
        samples[position:end] = audios[path]
        sentences.append(_make_span(recordings[path], position / RATE, end / RATE))
        pause_s = generator.uniform(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S)
        position = end + int(pause_s * RATE)
