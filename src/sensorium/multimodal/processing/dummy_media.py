"""Makes small media items of any modality: decoded media for trials, and files for warm-up."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np

from sensorium.multimodal.media import MediaLimits

# Seconds of audio, and heights and widths of images, for the items of index 0 and 1.
_DURATIONS_S = (1.0, 1.4)
_SHAPES = ((112, 168), (140, 84))
_NUM_FRAMES = 4  # the same for all, because some processors stack the frames of several videos


def make_dummy_media(modality: str, sampling_rate: int, *, index: int = 0) -> object:
    """Return a small decoded item of random content, different for each `index` (0 or 1)."""
    generator = np.random.default_rng(index)
    if modality == "audio":
        num_samples = int(_DURATIONS_S[index] * sampling_rate)
        return (0.1 * generator.standard_normal(num_samples)).astype(np.float32)
    height, width = _SHAPES[index]
    frames = () if modality == "image" else (_NUM_FRAMES,)
    return generator.integers(0, 256, (*frames, height, width, 3), dtype=np.uint8)


def make_varied_media(modality: str, sampling_rate: int) -> Iterator[object]:
    """Yield decoded media items of random content, with different lengths and shapes, for trials.

    A property that the processor's results for all these items share is assumed to hold for every
    item. One audio item is longer than the usual window of an encoder.
    """
    generator = np.random.default_rng(0)
    if modality == "audio":
        for duration_s in (1.0, 2.7, 31.0):
            num_samples = int(duration_s * sampling_rate)
            yield (0.1 * generator.standard_normal(num_samples)).astype(np.float32)
        return
    for num_frames, height, width in ((4, 112, 168), (8, 336, 224), (6, 64, 448)):
        frames = () if modality == "image" else (num_frames,)
        yield generator.integers(0, 256, (*frames, height, width, 3), dtype=np.uint8)


# Few models take audio of this rate, so that the file is resampled, as most files are.
_RATE = 24_000
_FPS = 4


def make_dummy_file(modality: str) -> bytes:
    """Return the bytes of a small image, audio or video file (PNG, WAV or MP4)."""
    media: Any = make_dummy_media(modality, _RATE)
    file = io.BytesIO()
    _WRITERS[modality](file, media)
    return file.getvalue()


def exceeds_limits(modality: str, limits: MediaLimits) -> bool:
    """Return True if the limits refuse the file that `make_dummy_file` makes.

    Then a failure to process this file does not mean that the model or the server has a problem.
    """
    media: Any = make_dummy_media(modality, _RATE)
    if len(make_dummy_file(modality)) > limits.max_bytes:
        return True
    if modality == "audio":
        return bool(len(media) > limits.max_duration_s * _RATE)
    height, width = media.shape[-3:-1]
    num_frames = 1 if modality == "image" else len(media)
    if modality == "video" and num_frames > limits.max_duration_s * _FPS:
        return True
    return bool(
        height * width > limits.max_pixels
        or num_frames > limits.max_frames
        or (modality == "video" and num_frames * height * width > limits.max_video_pixels)
    )


def _write_image(file: io.BytesIO, pixels: Any) -> None:
    from PIL import Image

    Image.fromarray(pixels).save(file, "PNG")


def _write_audio(file: io.BytesIO, samples: Any) -> None:
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(_RATE)
        audio.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())


def _write_video(file: io.BytesIO, frames: Any) -> None:
    import av

    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=_FPS)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


_WRITERS = {"image": _write_image, "audio": _write_audio, "video": _write_video}
