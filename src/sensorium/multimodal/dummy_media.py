"""A small item of any modality, for trials, for warm-up, and for learning what a processor makes of
one.
"""

from __future__ import annotations

import io
import wave

import numpy as np
import numpy.typing as npt

# Few sounds that models take have this rate: a file of it is resampled, as most files are.
_FILE_RATE = 24_000
_FILE_FPS = 4


def make_dummy_media(modality: str, sampling_rate: int) -> object:
    if modality == "audio":
        return _make_samples(sampling_rate)
    return _make_pixels(1)[0] if modality == "image" else _make_pixels(4)


def make_dummy_file(modality: str) -> bytes:
    """The same encoded, as a client would send it."""
    if modality == "audio":
        return _write_wave(_make_samples(_FILE_RATE))
    return _write_png(_make_pixels(1)[0]) if modality == "image" else _write_mp4(_make_pixels(4))


def _make_samples(num_samples: int) -> npt.NDArray[np.float32]:
    generator = np.random.default_rng(0)
    return (0.1 * generator.standard_normal(num_samples)).astype(np.float32)


def _make_pixels(num_frames: int) -> npt.NDArray[np.uint8]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (num_frames, 112, 168, 3), dtype=np.uint8)


def _write_wave(samples: npt.NDArray[np.float32]) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(_FILE_RATE)
        sound.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def _write_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _write_mp4(frames: npt.NDArray[np.uint8]) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=_FILE_FPS)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()
