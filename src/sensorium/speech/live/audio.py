"""Decodes raw audio that comes in chunks, into the samples that speech models take.

A chunk may end anywhere: in the middle of a sample, or of the stretch that the resampler needs.
What is left over waits for the next chunk, so the samples do not depend on where chunks end.
"""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sensorium.utils.silences import Samples

RATE = 16_000  # of all samples that this package passes on
Encoding = Literal["pcm16", "mulaw", "alaw"]
_LOUDEST = 32_768.0
_BYTES_PER_SAMPLE = {"pcm16": 2, "mulaw": 1, "alaw": 1}


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """The format of raw audio with one channel."""

    encoding: Encoding
    rate: int  # samples per second

    def count_seconds(self, num_bytes: int) -> float:
        return num_bytes / (_BYTES_PER_SAMPLE[self.encoding] * self.rate)


class AudioDecoder:
    def __init__(self, form: AudioFormat) -> None:
        self.form = form
        self._rest = b""  # the first byte of a sample, if a chunk has ended within it
        self._resampler = self._make_resampler()

    def decode(self, chunk: bytes) -> Samples:
        """Return the samples that are complete with this chunk, at 16 kHz."""
        if self.form.encoding != "pcm16":
            return self._resample(_make_table(self.form.encoding)[np.frombuffer(chunk, np.uint8)])
        chunk = self._rest + chunk
        end = len(chunk) & ~1
        self._rest = chunk[end:]
        return self._resample(np.frombuffer(chunk[:end], "<i2").astype(np.float32) / _LOUDEST)

    def flush(self) -> Samples:
        """Return the samples that wait for more audio, and begin a new stream."""
        self._rest = b""
        if self._resampler is None:
            return np.zeros(0, np.float32)
        tail: Samples = self._resampler.resample_chunk(np.zeros(0, np.float32), last=True)
        self._resampler = self._make_resampler()
        return tail

    def _resample(self, samples: Samples) -> Samples:
        if self._resampler is None:
            return samples
        resampled: Samples = self._resampler.resample_chunk(samples)
        return resampled

    def _make_resampler(self) -> Any:
        if self.form.rate == RATE:
            return None
        import soxr  # type: ignore[import-untyped]

        # "HQ" is also the quality with which files are resampled.
        return soxr.ResampleStream(self.form.rate, RATE, 1, dtype="float32", quality="HQ")


@cache
def _make_table(encoding: Encoding) -> npt.NDArray[np.float32]:
    """Return the sample that each byte of G.711 stands for (ITU-T G.711, tables 1 and 2)."""
    codes = np.arange(256)
    if encoding == "mulaw":
        bits = ~codes & 0xFF
        sizes = ((((bits & 0x0F) << 3) + 0x84) << ((bits & 0x70) >> 4)) - 0x84
        is_negative = (bits & 0x80) != 0
    else:
        bits = codes ^ 0x55
        exponents = (bits & 0x70) >> 4
        steps = (bits & 0x0F) << 4
        sizes = np.where(exponents == 0, steps + 8, (steps + 0x108) << np.maximum(exponents - 1, 0))
        is_negative = (bits & 0x80) == 0
    return (np.where(is_negative, -sizes, sizes) / _LOUDEST).astype(np.float32)


def write_wav(samples: Samples) -> bytes:
    """Return samples as a WAV file with 16 bits."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        scaled = np.clip(np.rint(samples * _LOUDEST), -_LOUDEST, _LOUDEST - 1)
        file.writeframes(scaled.astype("<i2").tobytes())
    return content.getvalue()
