"""A small item of any modality as a file, as a client would send it: for warm-up."""

from __future__ import annotations

import io
import wave
from typing import Any

from sensorium.multimodal.dummy_media import make_dummy_media

# Few models take sounds of this rate: a file of it is resampled, as most files are.
_RATE = 24_000
_FPS = 4


def make_dummy_file(modality: str) -> bytes:
    """A PNG, a WAV or an MP4."""
    media: Any = make_dummy_media(modality, _RATE)
    file = io.BytesIO()
    _WRITERS[modality](file, media)
    return file.getvalue()


def _write_image(file: io.BytesIO, pixels: Any) -> None:
    from PIL import Image

    Image.fromarray(pixels).save(file, "PNG")


def _write_sound(file: io.BytesIO, samples: Any) -> None:
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(_RATE)
        sound.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())


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


_WRITERS = {"image": _write_image, "audio": _write_sound, "video": _write_video}
