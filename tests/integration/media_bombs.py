"""Small files that ask for much memory: each for more than the tests allow for all of them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from PIL import Image, features

from tests.support.media import (
    make_clip,
    make_melody,
    make_pixels,
    make_png,
    write_av_audio,
    write_image,
    write_video,
)

LARGE = 100_000  # squared: ten gigapixels
TABLE_LENGTH = 60_000_000


def replace_at(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


def make_tiff() -> bytes:
    tags = [
        (256, 4, LARGE),  # width
        (257, 4, LARGE),  # height
        (258, 3, 8),  # bits of a sample
        (259, 3, 1),  # not compressed
        (262, 3, 1),  # black is zero
        (273, 4, 8),  # where the pixels stand
        (277, 3, 1),  # samples of a pixel
        (278, 4, LARGE),  # rows of a strip
        (279, 4, 100),  # bytes of a strip
    ]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4)


def make_bmp() -> bytes:
    return replace_at(write_image(make_pixels(), "BMP"), 18, struct.pack("<ii", LARGE, LARGE))


def make_gif() -> bytes:
    data = write_image(make_pixels(), "GIF")
    size = struct.pack("<HH", 40, 24)
    return data.replace(size, struct.pack("<HH", 65_535, 65_535))


def make_jpeg() -> bytes:
    data = write_image(make_pixels(), "JPEG")
    return replace_at(data, data.index(b"\xff\xc0") + 5, struct.pack(">HH", 65_500, 65_500))


def make_webp(mode: bytes) -> bytes:
    """Make an extended, lossless or lossy file with a side of 16 million, 16384 or 16383."""
    content = {
        b"VP8X": bytes(4) + b"\xff" * 6,
        b"VP8L": b"\x2f" + struct.pack("<I", 0x0FFFFFFF) + bytes(5),
        b"VP8 ": b"\x10\0\0\x9d\x01\x2a" + struct.pack("<HH", 0x3FFF, 0x3FFF),
    }[mode]
    chunk = mode + struct.pack("<I", len(content)) + content
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def make_avif() -> bytes:
    data = write_image(make_pixels(), "AVIF")
    return replace_at(data, data.index(b"ispe") + 8, struct.pack(">II", LARGE, LARGE))


def make_notes(name: bytes, prefix: bytes) -> bytes:
    return make_png(4, 4, (name, prefix + zlib.compress(bytes(300_000_000), 1)))


def make_vp8() -> bytes:
    """Make a video with frames that are larger than the container's header states."""
    data = write_video(make_clip(3), "webm", "libvpx")
    start = data.index(b"\x9d\x01\x2a") + 3
    return replace_at(data, start, struct.pack("<HH", 0x3FFF, 0x3FFF))


def make_mp3_with_cover() -> bytes:
    cover = write_image(Image.new("L", (8_000, 8_000)), "PNG")
    picture = b"\0image/png\0\x03\0" + cover
    frame = b"APIC" + struct.pack(">I", len(picture)) + bytes(2) + picture
    size = bytes(len(frame) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x03\0\0" + size + frame + write_av_audio(make_melody(2400), "mp3", "libmp3lame")


def make_mp4_with_table() -> bytes:
    """Make a video of a kilobyte that lists sixty million samples of one byte."""
    data = write_video(make_clip(6))
    for name, skipped, content in [
        (b"stsz", 4, struct.pack(">II", 1, TABLE_LENGTH)),
        (b"stsc", 8, struct.pack(">III", 1, TABLE_LENGTH, 1)),
        (b"stts", 8, struct.pack(">II", TABLE_LENGTH, 1024)),
    ]:
        data = replace_at(data, data.index(name) + 4 + skipped, content)
    return data


BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "png": ("image", lambda: make_png(LARGE, LARGE)),
    "tiff": ("image", make_tiff),
    "bmp": ("image", make_bmp),
    "gif": ("image", make_gif),
    "jpeg": ("image", make_jpeg),
    "webp extended": ("image", lambda: make_webp(b"VP8X")),
    "webp lossless": ("image", lambda: make_webp(b"VP8L")),
    "webp lossy": ("image", lambda: make_webp(b"VP8 ")),
    "png note": ("image", lambda: make_notes(b"zTXt", b"note\0\0")),
    "png profile": ("image", lambda: make_notes(b"iCCP", b"profile\0\0")),
    "gif video": ("video", make_gif),
    "webm": ("video", make_vp8),
    "mp3 cover": ("audio", make_mp3_with_cover),
}
if features.check("avif"):
    BOMBS["avif"] = ("image", make_avif)
