"""The size that the header of an encoded image claims, read in bounded time and without a decoder.

For the process that serves requests: an image library's own look at a file may follow millions of
chunks, or allocate a canvas. The size may be wrong where a file lies about itself, so it is good
for estimates and for refusals; decoders check the size that they find once more.
"""

from __future__ import annotations

import struct

Size = tuple[int, int]  # width and height, as stored: not turned upright
_MAX_JPEG_SEGMENTS = 1_000
_MAX_TIFF_TAGS = 1_000
_AVIF_PREFIX_BYTES = 1 << 16  # in which the boxes with the properties of an image stand
# Markers of JPEG that begin a frame: C0 to CF without those for tables.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_TIFF_WIDTH, _TIFF_HEIGHT = 256, 257
_TIFF_SHORT, _TIFF_LONG = 3, 4


def read_header_size(data: bytes) -> Size | None:
    """Return the size that the header claims; `None` where it can't be found in a few steps."""
    try:
        return _read_size(data)
    except struct.error:  # the file ends within its header
        return None


def _read_size(data: bytes) -> Size | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _unpack(">II", data, 16)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _unpack("<HH", data, 6)
    if data.startswith(b"BM"):
        return _read_bmp(data)
    if data.startswith(b"\xff\xd8"):
        return _read_jpeg(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return read_webp_size(data)
    if data.startswith((b"II*\0", b"MM\0*")):
        return _read_tiff(data)
    if data[4:8] == b"ftyp":
        return _read_avif(data)
    return None


def read_webp_size(data: bytes) -> Size | None:
    """Return the size of the canvas that a WebP file asks for; `None` if it is cut short."""
    kind, header = data[12:16], data[20:30]
    if len(header) < 10:
        return None
    if kind == b"VP8X":
        width, height = header[4:7], header[7:10]
        return int.from_bytes(width, "little") + 1, int.from_bytes(height, "little") + 1
    if kind == b"VP8L":
        sizes = int.from_bytes(header[1:5], "little")
        return (sizes & 0x3FFF) + 1, (sizes >> 14 & 0x3FFF) + 1
    width, height = header[6:8], header[8:10]
    return int.from_bytes(width, "little") & 0x3FFF, int.from_bytes(height, "little") & 0x3FFF


def _read_bmp(data: bytes) -> Size:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    if header_bytes == 12:
        return _unpack("<HH", data, 18)
    width, height = _unpack("<ii", data, 18)
    return abs(width), abs(height)  # a negative height is stored from the top


def _read_jpeg(data: bytes) -> Size | None:
    position = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        marker, length = struct.unpack_from(">xBH", data, position)
        if marker in _JPEG_FRAMES:
            height, width = _unpack(">HH", data, position + 5)
            return width, height
        position += 1 if marker == 0xFF else 2 + length  # markers may be padded by FF
    return None


def _read_tiff(data: bytes) -> Size | None:
    order = "<" if data[:2] == b"II" else ">"
    (start,) = struct.unpack_from(f"{order}I", data, 4)
    (num_tags,) = struct.unpack_from(f"{order}H", data, start)
    sizes: dict[int, int] = {}
    for index in range(min(num_tags, _MAX_TIFF_TAGS)):
        place = start + 2 + 12 * index
        tag, kind = struct.unpack_from(f"{order}HH", data, place)
        if tag in (_TIFF_WIDTH, _TIFF_HEIGHT) and kind in (_TIFF_SHORT, _TIFF_LONG):
            code = "H" if kind == _TIFF_SHORT else "I"
            (sizes[tag],) = struct.unpack_from(f"{order}{code}", data, place + 8)
    if sizes.keys() != {_TIFF_WIDTH, _TIFF_HEIGHT}:
        return None
    return sizes[_TIFF_WIDTH], sizes[_TIFF_HEIGHT]


def _read_avif(data: bytes) -> Size | None:
    """A file may hold several images, e.g. a thumbnail: the largest one counts."""
    prefix = data[:_AVIF_PREFIX_BYTES]
    sizes: list[Size] = []
    place = prefix.find(b"ispe")
    while 0 <= place <= len(prefix) - 16:
        sizes.append(_unpack(">II", prefix, place + 8))
        place = prefix.find(b"ispe", place + 4)
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


def _unpack(layout: str, data: bytes, place: int) -> Size:
    first, second = struct.unpack_from(layout, data, place)
    return first, second
