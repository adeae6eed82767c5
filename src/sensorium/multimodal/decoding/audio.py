"""Decodes audio files to mono float32 samples at the model's rate, for its feature extractor.

Audio is decoded, mixed down and resampled piece by piece, so that only one piece and the result are
in memory, even if a file has a high rate or many channels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sensorium.multimodal.decoding.guards import (
    AUDIO_FRAME_S,
    WorkBudget,
    check_duration,
    estimate_audio_s,
    get_first_stream,
    open_container,
    refuse_if_longer,
)
from sensorium.multimodal.media import MediaLimits
from sensorium.types.errors import RequestError

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame

Samples = npt.NDArray[np.float32]
_MIN_RATE, _MAX_RATE = 1_000, 768_000
_COVER_PIXELS = 16_000_000  # the limit for a cover picture in an audio file, which is not decoded
_PIECE = 1 << 16  # samples; short frames are joined, because each call of the resampler takes time


def decode_audio(
    data: bytes, *, sampling_rate: int, limits: MediaLimits, budget: WorkBudget | None = None
) -> Samples:
    """Return the first audio track of a file as mono float32 samples at `sampling_rate`.

    Raise `RequestError` if the track can't be decoded, is empty, or is longer than `limits` allow.
    Raise `CostlyItemError` if decoding is more work than `budget` allows; without a budget it may
    take any time.
    """
    budget = budget or WorkBudget()
    with open_container(data, "audio", max_pixels=_COVER_PIXELS) as container:
        stream = get_first_stream(container.streams.audio, "this file has no audio track")
        budget.expect(estimate_audio_s(check_duration(container, stream, limits.max_duration_s)))
        check_rate(rate := stream.rate)
        mono = _read_mono(container.decode(stream), rate, limits.max_duration_s, budget)
        if container.format.name == "ogg" and stream.duration is not None:
            mono = _trim_end(mono, stream.duration * (stream.time_base or 0) * rate)
        pieces = list(_resample_pieces(_gather(mono), rate, sampling_rate))
        samples = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32)
    check_samples(samples)
    return samples


def check_rate(rate: object) -> None:
    """Raise `RequestError` unless `rate` is an integer from 1,000 to 768,000 samples per second."""
    is_rate = isinstance(rate, int) and not isinstance(rate, bool)
    if not is_rate or not _MIN_RATE <= rate <= _MAX_RATE:  # type: ignore[operator]
        raise RequestError(
            f"a sampling rate must be from {_MIN_RATE} to {_MAX_RATE} samples a second, "
            f"not {rate!r}"
        )


def check_samples(samples: Samples) -> None:
    """Raise `RequestError` if the audio has no samples, or a sample that is NaN or infinite."""
    if not samples.size:
        raise RequestError("this audio is empty: it has no samples")
    if not np.isfinite(samples).all():
        raise RequestError(
            "some samples of this audio are not finite numbers: they are NaN or infinite"
        )


def resample(samples: Samples, rate: int, new_rate: int) -> Samples:
    """Return mono samples at the rate `new_rate`, with soxr's quality "HQ", as librosa does."""
    return np.concatenate(list(_resample_pieces([samples], rate, new_rate)))


def _read_mono(
    frames: Iterator[AudioFrame], rate: int, max_duration_s: float, budget: WorkBudget
) -> Iterator[Samples]:
    num_samples = 0
    for frame in frames:
        if frame.sample_rate != rate:
            raise RequestError(
                "the sampling rate of this audio changes in the middle: convert it to one rate"
            )
        num_samples += frame.samples
        refuse_if_longer(num_samples / rate, max_duration_s)
        # The number of frames is not limited by the duration: one may have a single sample.
        budget.spend(estimate_audio_s(frame.samples / rate) + AUDIO_FRAME_S)
        values = _read_samples(frame)
        if not frame.format.is_planar:
            values = values.reshape(-1, frame.layout.nb_channels).T
        yield mix_down(scale_samples(values))


def _read_samples(frame: AudioFrame) -> npt.NDArray[Any]:
    try:
        return frame.to_ndarray()
    except ValueError as error:  # the only error here that depends on the file
        raise RequestError(
            f"the samples of this audio have a format that is not supported: {frame.format.name}"
        ) from error


def mix_down(channels: Samples) -> Samples:
    """Return mono samples: the mean over the channels, which are the rows of `channels`."""
    with np.errstate(over="ignore", invalid="ignore"):  # results that are not finite: refused later
        mixed: Samples = channels[0] if len(channels) == 1 else channels.mean(axis=0)
    return mixed


def scale_samples(values: npt.NDArray[Any]) -> Samples:
    """Return audio samples as float32, with integer samples scaled to the range from -1 to 1."""
    if values.dtype == np.uint8:  # FFmpeg's only unsigned samples: silence is 128
        return (values.astype(np.float32) - 128) / np.float32(128)
    if values.dtype.kind == "i":
        scaled: Samples = (values / -float(np.iinfo(values.dtype).min)).astype(np.float32)
        return scaled
    with np.errstate(over="ignore"):  # too large values become infinite, which is refused later
        return values.astype(np.float32)


def _trim_end(pieces: Iterator[Samples], length: Fraction | int) -> Iterator[Samples]:
    """Yield the pieces of the audio, cut off after `length` samples in all.

    The last packet of an Ogg file is always decoded as a whole, although the audio may end inside
    it. Nothing is cut off if another piece follows the one that crosses `length`, because then the
    length in the header is wrong.
    """
    left = round(length)
    held = np.zeros(0, dtype=np.float32)
    for piece in pieces:
        if len(held):  # the audio continues, so the given length is wrong
            yield held
            left = sys.maxsize
        yield piece[:left]
        held = piece[left:]
        left -= len(piece) - len(held)


def _gather(pieces: Iterator[Samples]) -> Iterator[Samples]:
    waiting: list[Samples] = []
    num_waiting = 0
    for piece in pieces:
        waiting.append(piece)
        num_waiting += len(piece)
        if num_waiting >= _PIECE:
            yield np.concatenate(waiting)
            waiting, num_waiting = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _resample_pieces(
    pieces: Iterator[Samples] | list[Samples], rate: int, new_rate: int
) -> Iterator[Samples]:
    if rate == new_rate:
        yield from pieces
        return
    import soxr  # type: ignore[import-untyped]

    stream = soxr.ResampleStream(rate, new_rate, 1, dtype="float32", quality="HQ")
    process: Callable[..., Samples] = stream.resample_chunk
    for piece in pieces:
        yield process(np.ascontiguousarray(piece))
    yield process(np.zeros(0, dtype=np.float32), last=True)
