"""Makes small files of every format that is decoded, with libraries that write these formats."""

from __future__ import annotations

import io
import struct
import zlib
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import soundfile
from PIL import Image

RATE = 16_000
Pixels = npt.NDArray[np.uint8]
Samples = npt.NDArray[np.float32]


def make_pixels(height: int = 24, width: int = 40, *, seed: int = 0) -> Pixels:
    """Return a picture of smooth colours, which lossy formats preserve."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def write_image(image: Image.Image | Pixels, kind: str, **options: Any) -> bytes:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def make_melody(num_samples: int = 4000, *, pitch: float = 440.0, rate: int = RATE) -> Samples:
    return (0.5 * np.sin(2 * np.pi * pitch / rate * np.arange(num_samples))).astype(np.float32)


def write_audio(samples: npt.NDArray[Any], kind: str, subtype: str, *, rate: int = RATE) -> bytes:
    """Write samples to a file; several channels are the columns of an array."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def write_av_audio(samples: Samples, kind: str, codec: str, *, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        resampler = av.AudioResampler(
            format=stream.format, layout="mono", rate=rate, frame_size=stream.frame_size or 1024
        )
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        for part in (frame, None):
            for piece in resampler.resample(part):
                container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return file.getvalue()


def make_clip(num_frames: int = 12, height: int = 32, width: int = 48) -> Pixels:
    """Return frames of different greys, by which they can be identified after lossy coding."""
    clip = np.empty((num_frames, height, width, 3), dtype=np.uint8)
    clip[:] = get_grey(np.arange(num_frames))[:, None, None, None]
    return clip


def get_grey(index: Any) -> Any:
    return 20 + index * 17 % 200


def write_video(
    clip: Pixels,
    kind: str = "mp4",
    codec: str = "mpeg4",
    *,
    fps: Fraction | int = 10,
    pixel_format: str = "yuv420p",
    options: dict[str, str] | None = None,
    codec_options: dict[str, str] | None = None,
) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=kind, options=options or {}) as container:
        stream = container.add_stream(codec, rate=fps, options=codec_options or {})
        stream.height, stream.width = clip.shape[1:3]
        stream.pix_fmt = pixel_format
        stream.thread_count = 1
        stream.bit_rate = 400_000
        for pixels in clip:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def make_png(width: int, height: int, *extra_chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG that has a header and no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), *extra_chunks, (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_make_chunk(*chunk) for chunk in chunks)


def _make_chunk(name: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )


def make_images() -> dict[str, bytes]:
    pixels = make_pixels()
    alpha = Image.fromarray(pixels).convert("RGBA")
    alpha.putalpha(100)
    frames = [Image.fromarray(make_pixels(seed=seed)) for seed in (1, 2)]
    images = {
        "png": write_image(pixels, "PNG"),
        "png rgba": write_image(alpha, "PNG"),
        "png 16": write_image(Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16)), "PNG"),
        "apng": write_image(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "jpeg": write_image(pixels, "JPEG"),
        "jpeg progressive": write_image(pixels, "JPEG", progressive=True),
        "jpeg cmyk": write_image(Image.fromarray(pixels).convert("CMYK"), "JPEG"),
        "webp": write_image(pixels, "WEBP"),
        "webp lossless": write_image(alpha, "WEBP", lossless=True),
        "webp animated": write_image(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "gif": write_image(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "tiff": write_image(pixels, "TIFF"),
        "tiff lzw": write_image(pixels, "TIFF", compression="tiff_lzw"),
        "tiff jpeg": write_image(pixels, "TIFF", compression="jpeg"),
        "bmp": write_image(pixels, "BMP"),
    }
    if "AVIF" in Image.SAVE:
        images["avif"] = write_image(pixels, "AVIF")
    return images


def make_audios() -> dict[str, bytes]:
    melody = make_melody(2400)
    wide = make_melody(2400, rate=48_000)
    return {
        "wav 16": write_audio(melody, "WAV", "PCM_16"),
        "wav 24": write_audio(melody, "WAV", "PCM_24"),
        "wav float": write_audio(np.stack([melody, melody], axis=1), "WAV", "FLOAT"),
        "flac": write_audio(melody, "FLAC", "PCM_16"),
        "mp3": write_av_audio(melody, "mp3", "libmp3lame"),
        "ogg vorbis": write_audio(melody, "OGG", "VORBIS"),
        "ogg opus": write_av_audio(wide, "ogg", "libopus", rate=48_000),
        "m4a": write_av_audio(melody, "ipod", "aac"),
        "aac": write_av_audio(melody, "adts", "aac"),
        "webm sound": write_av_audio(wide, "webm", "libopus", rate=48_000),
    }


def make_videos() -> dict[str, bytes]:
    clip = make_clip(6)
    fast = {"preset": "ultrafast"}
    return {
        "mp4 mpeg4": write_video(clip),
        "mp4 h264": write_video(clip, "mp4", "libx264", codec_options=fast),
        "mp4 fragmented": write_video(
            clip,
            "mp4",
            "libx264",
            codec_options=fast,
            options={"movflags": "frag_keyframe+empty_moov"},
        ),
        "webm vp8": write_video(clip, "webm", "libvpx", codec_options={"deadline": "realtime"}),
        "webm vp9": write_video(clip, "webm", "libvpx-vp9", codec_options={"deadline": "realtime"}),
        "mkv h264": write_video(clip, "matroska", "libx264", codec_options=fast),
        "gif": write_video(clip, "gif", "gif", pixel_format="rgb8"),
    }
