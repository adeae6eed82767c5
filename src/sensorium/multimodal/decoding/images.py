"""Decodes images to pixels: red, green and blue, upright, on a plain background.

Owns the list of formats and the conversion of each colour mode. The size is checked before a pixel
is allocated. Files are opened by the formats' own functions, not by `Image.open`, which has a
global limit.

Two functions find the width and height of an image without decoding it. `read_header_size` takes
bounded time and no image library, which may follow millions of chunks or allocate a canvas. So it
can run in the process that serves requests, for estimates and refusals. `read_image_size` opens
the file with the library, and gives the size that `decode_image` would give, or `None` where only
decoding can find it. It does not detect damage behind the header.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image

from sensorium.multimodal.decoding.guards import WorkBudget, estimate_frames_s, refuse_damaged
from sensorium.multimodal.media import MediaLimits
from sensorium.types.errors import RequestError

Size = tuple[int, int]  # width and height, as stored: not turned upright
_MAX_JPEG_SEGMENTS = 1_000
_MAX_TIFF_TAGS = 1_000
_AVIF_PREFIX_BYTES = 1 << 16  # the boxes with the properties of an image are in this part
# Markers of JPEG that begin a frame: C0 to CF without those for tables.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_TIFF_WIDTH, _TIFF_HEIGHT = 256, 257
_TIFF_SHORT, _TIFF_LONG = 3, 4


def read_header_size(data: bytes) -> Size | None:
    """Return the width and height in an image file's header, or `None` if they are not found.

    The header may be wrong, and the image is not turned upright by its EXIF data. The number of
    steps is bounded.
    """
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
        return _read_webp(data)
    if data.startswith((b"II*\0", b"MM\0*")):
        return _read_tiff(data)
    if data[4:8] == b"ftyp":
        return _read_avif(data)
    return None


def _read_webp(data: bytes) -> Size | None:
    """Return the canvas size in a WebP file's header, or `None` if the header is truncated."""
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
    return abs(width), abs(height)  # a negative height means that the top row comes first


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
    """Return the size of the largest image in an AVIF file, which may also hold a thumbnail."""
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


# The decoders of these formats read nothing but the given bytes, and start no other program. Some
# builds of Pillow lack AVIF or WebP.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF", "TIFF", "BMP")
_KIND = "an image"
# What Pillow raises for damaged files, found in its sources and by trying a hundred thousand files.
# `RuntimeError` comes from its AVIF decoder. `TypeError` and `AttributeError` are left out on
# purpose, because they would hide our own bugs. `load_pixels` has one exception to this rule.
DECODER_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    OverflowError,
    RuntimeError,
    struct.error,
    Image.DecompressionBombError,
)
_PREFIX_BYTES = 16  # by which Pillow's formats recognise a file
_DEEP_GREY_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
_TO_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
WHITE = (255, 255, 255)
Colour = tuple[int, int, int]


def decode_image(
    data: bytes,
    *,
    limits: MediaLimits,
    background: Colour = WHITE,
    budget: WorkBudget | None = None,
) -> Image.Image:
    """Return the first frame of an image file in RGB, turned upright by its EXIF data.

    `background` is the colour behind transparent parts. Raise `RequestError` if the file is
    damaged, of an unsupported format, or larger than `limits` allow. Raise `CostlyItemError` if
    decoding is more work than `budget` allows.
    """
    with _open_checked(data, limits) as image:
        if budget is not None:
            budget.expect(estimate_frames_s(1, *image.size))
        try:
            load_pixels(image)
        except Image.DecompressionBombError as error:
            raise RequestError(_too_many_pixels(limits)) from error
        turn = _get_turn(image.getexif)
        upright = to_rgb(image if turn is None else image.transpose(turn), background=background)
        upright.info = {}  # without EXIF data, by which a reader would turn it again
        return upright


@contextmanager
def _open_checked(data: bytes, limits: MediaLimits) -> Iterator[Image.Image]:
    """Open an image file without decoding its pixels, and refuse a damaged or too large one."""
    with refuse_damaged(_KIND, *DECODER_ERRORS):
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            # WebP's decoder allocates its canvas when it is made, so the header is read before.
            size = _read_webp(data)
            if size is None:
                raise ValueError("the header is truncated")
            check_num_pixels(*size, limits)
        with open_image(data) as image:
            check_num_pixels(*image.size, limits)
            yield image


def load_pixels(image: Image.Image) -> None:
    """Decode the pixels of an opened image, or raise one of `DECODER_ERRORS` if it is damaged."""
    try:
        image.load()
    except TypeError as error:  # Pillow computes with the tags of a TIFF, whatever type they have
        raise ValueError("a field of the file has a wrong type") from error
    _drop_texts(image)


def check_num_pixels(width: int, height: int, limits: MediaLimits) -> None:
    """Raise `RequestError` if an image or a frame has too many pixels, or too long an edge."""
    if width * height > limits.max_pixels:
        raise RequestError(f"{_too_many_pixels(limits)} (this one: {width} x {height})")
    if max(width, height) > limits.max_edge:
        raise RequestError(
            f"the image or frame is {width} x {height} pixels large, but {limits.max_edge} is the "
            "limit for its width and for its height"
        )


def to_rgb(image: Image.Image, *, background: Colour = WHITE) -> Image.Image:
    """Convert an image of any colour mode to RGB, with `background` behind transparent parts."""
    if image.mode in _DEEP_GREY_MODES:
        image = _scale_deep_grey(image)  # Pillow would clip the values instead
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode == "La":  # premultiplied grey, which Pillow converts only to LA
        image = image.convert("LA")
    colours = image.convert("RGBA")
    plain = Image.new("RGBA", colours.size, (*background, 255))
    return Image.alpha_composite(plain, colours).convert("RGB")


def open_image(data: bytes) -> Image.Image:
    """Open an image file with Pillow, without decoding its pixels.

    Raise `RequestError` for an unsupported format, and one of `DECODER_ERRORS` for a damaged
    header.
    """
    Image.init()
    prefix = data[:_PREFIX_BYTES]
    for name in _FORMATS:
        if name not in Image.OPEN:
            continue
        factory, accept = Image.OPEN[name]
        accepts = cast("Callable[[bytes], bool | str]", accept)
        # A text instead of True is the reason why this build of Pillow can't read the format.
        if accepts(prefix) is True:
            image = cast("Image.Image", factory(io.BytesIO(data), ""))
            _drop_texts(image)
            return image
    known = ", ".join(_FORMATS)
    raise RequestError(f"this is not an image of a supported format ({known})")


def _drop_texts(image: Image.Image) -> None:
    """Remove a PNG's texts with names under which Pillow stores other values, such as EXIF."""
    for name in ("transparency", "exif", "xmp"):
        if isinstance(image.info.get(name), str):
            del image.info[name]


def _too_many_pixels(limits: MediaLimits) -> str:
    return f"the image or frame has more than {limits.max_pixels} pixels, which is the limit"


def _get_turn(read_exif: Callable[[], Image.Exif]) -> Image.Transpose | None:
    """Return how to turn an image upright, or `None` if it already is or has damaged EXIF data."""
    try:
        orientation = read_exif().get(ExifTags.Base.Orientation)
    except DECODER_ERRORS:  # damaged EXIF data, but good pixels
        return None
    return _TO_UPRIGHT.get(orientation) if isinstance(orientation, int) else None


def _scale_deep_grey(image: Image.Image) -> Image.Image:
    """Convert a grey image of more than 8 bits per pixel to grey of 8 bits, with alpha if needed.

    Pillow's modes I (integers) and F (floating-point numbers) do not define which value is white.
    The largest value in the image decides between 1 (only for F), 255 and 65535.
    """
    values: npt.NDArray[Any] = np.asarray(image)
    grey = Image.fromarray(_to_bytes(values, _find_white(image.mode, values)))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):  # the one grey that is transparent
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


def _find_white(mode: str, values: npt.NDArray[Any]) -> int:
    if mode.startswith("I;16"):
        return 65535
    least, most = float(values.min()), float(values.max())
    if not (least >= 0 and most <= 65535):  # NaN is also refused
        raise RequestError(
            "the image's grey values are not between 0 and 65535: convert it to 8 or 16 bits"
        )
    if mode == "F" and most <= 1:
        return 1
    return 255 if most <= 255 else 65535


def _to_bytes(values: npt.NDArray[Any], white: int) -> npt.NDArray[np.uint8]:
    if white == 65535 and values.dtype.kind in "iu":
        table = np.rint(np.arange(65536) * (255 / 65535)).astype(np.uint8)
        return np.take(table, values)
    scaled: npt.NDArray[np.uint8] = np.rint(values * (255 / white)).astype(np.uint8)
    return scaled


_SIZED_FORMATS = ("PNG", "JPEG", "MPO", "WEBP")
_PNG_SIGNATURE_BYTES = 8
_PNG_HEADER = struct.Struct(">I4s")  # a chunk's length and name
_PNG_CRC_BYTES = 4
_SWAPPING = [_TO_UPRIGHT[orientation] for orientation in (5, 6, 7, 8)]  # width and height


def read_image_size(data: bytes, *, limits: MediaLimits) -> tuple[int, int] | None:
    """Return the width and height that the decoded, upright image will have, without decoding it.

    Return `None` if only decoding can find them: for other formats than PNG, JPEG and WebP, for
    animated PNGs, and where EXIF data may follow the pixels. Raise `RequestError` if the file is no
    image, or larger than `limits` allow.
    """
    if len(data) > limits.max_bytes:
        raise RequestError(f"the file has more than {limits.max_bytes} bytes, which is the limit")
    with _open_checked(data, limits) as image:
        is_plain = image.format != "PNG" or _is_plain_png(data)
        if image.format not in _SIZED_FORMATS or not is_plain:
            return None
        # Not `image.getexif`, because that of a PNG decodes the file to read beyond the pixels.
        turn = _get_turn(lambda: Image.Image.getexif(image))
        width, height = image.size
        return (height, width) if turn in _SWAPPING else (width, height)


def _is_plain_png(data: bytes) -> bool:
    """Return True if a PNG is not animated, and its pixels follow all that decides its size."""
    position = _PNG_SIGNATURE_BYTES
    has_pixels = False
    while position + _PNG_HEADER.size <= len(data):
        length, name = _PNG_HEADER.unpack_from(data, position)
        if name == b"IEND":
            return has_pixels
        if name == b"acTL" or (has_pixels and name != b"IDAT"):
            return False
        has_pixels = has_pixels or name == b"IDAT"
        position += _PNG_HEADER.size + length + _PNG_CRC_BYTES
    return False
