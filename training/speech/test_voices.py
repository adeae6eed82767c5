"""Voices for the test only: a neural synthesizer that is not used in training, and people."""

from __future__ import annotations

import re
import wave
from pathlib import Path
from typing import Any

import numpy as np

from training.speech.resample import SAMPLE_RATE, resample, to_int16
from training.speech.words import VOCABULARY

Recording = tuple[str, np.ndarray, str]  # name, int16 audio at 16 kHz, transcript

GO_FORWARD = "go forward ten meters"  # what is said in goforward.raw


class Hibari:
    """The voice of the package hibari-tts, which needs onnxruntime."""

    def __init__(self) -> None:
        from hibari import Hibari as Synthesizer  # type: ignore[import-not-found]

        self._synthesizer: Any = Synthesizer()

    def speak(self, text: str, *, speed: float = 1.0) -> np.ndarray:
        """Return int16 samples at 16 kHz, the same for the same text."""
        samples = self._synthesizer(text[:1].upper() + text[1:] + ".", speed=speed, seed=0)
        return to_int16(32767 * resample(samples, self._synthesizer.sample_rate))


def read_wave(path: Path) -> np.ndarray:
    """Read a mono file of 16-bit samples and bring it to 16 kHz."""
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        return to_int16(resample(samples, file.getframerate()))


def human_recordings(folder: Path) -> list[Recording]:
    """The eleven recordings of Debian's pocketsphinx-testdata, with what is said in them."""
    recordings: list[Recording] = []
    for transcripts in (folder / "cards/cards.transcription", folder / "librivox/transcription"):
        for line in transcripts.read_text().splitlines():
            said = re.fullmatch(r"<s>\s*(.*?)\s*</s>\s*\((.*)\)", line.strip())
            if said:
                audio = read_wave(transcripts.parent / f"{said[2]}.wav")
                recordings.append((said[2], audio, said[1]))
    go_forward = np.frombuffer((folder / "goforward.raw").read_bytes(), np.int16)
    return [*recordings, ("goforward", go_forward, GO_FORWARD)]


def fits_vocabulary(transcript: str) -> bool:
    return set(transcript.split()) <= set(VOCABULARY)


def report(folder: Path) -> str:
    """One line for each recording: its length, whether its words are known, and the words."""
    return "\n".join(
        f"{name:45} {len(audio) / SAMPLE_RATE:5.1f} s  {len(said.split()):2} words  "
        f"{'fits' if fits_vocabulary(said) else 'does not fit'}: {said}"
        for name, audio, said in human_recordings(folder)
    )
