"""Encoded images to pixels: red, green and blue, upright, on a plain background.

Owns the list of formats and what becomes of each colour mode. The size is known and checked before
a pixel is allocated. Files are opened by the formats' own functions, not by `Image.open`, whose
limit is a global of the process.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image

from sensorium.multimodal.decoding.damage import refuse_damaged
from sensorium.multimodal.decoding.image_header import read_webp_size
from sensorium.multimodal.decoding.work_budget import WorkBudget, estimate_frames_s
from sensorium.multimodal.limits import MediaLimits
from sensorium.types.errors import RequestError

# Formats whose decoders read nothing but the bytes they are given and start no other program.
# AVIF and WebP as Pillow was built.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF", "TIFF", "BMP")
_KIND = "an image"
# What Pillow raises for damaged files, by its sources and by a hundred thousand damaged files.
# `RuntimeError` is what its AVIF decoder raises. `TypeError` and `AttributeError` are not among
# them on purpose: they would hide mistakes of ours. `load_pixels` makes an exception.
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
_PREFIX_BYTES = 16  # what Pillow's formats look at to know their own
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
    """An RGB image, turned as its EXIF data says; of several frames the first."""
    with refuse_damaged(_KIND, *DECODER_ERRORS):
        check_webp_size(data, limits)
        with open_image(data) as image:
            check_num_pixels(*image.size, limits)
            if budget is not None:
                budget.expect(estimate_frames_s(1, *image.size))
            try:
                load_pixels(image)
            except Image.DecompressionBombError as error:
                raise RequestError(_too_many_pixels(limits)) from error
            upright = to_rgb(_turn_upright(image), background=background)
            upright.info = {}  # nobody turns it again
            return upright


def load_pixels(image: Image.Image) -> None:
    """Decode an image that was opened. Errors are those in `DECODER_ERRORS`."""
    try:
        image.load()
    except TypeError as error:  # Pillow takes tags of any type from a TIFF, and computes with them
        raise ValueError("a field of the file has a wrong type") from error
    _drop_texts(image)


def check_num_pixels(width: int, height: int, limits: MediaLimits) -> None:
    """Raise `RequestError` if a picture or a frame of that size is too large."""
    if width * height > limits.max_pixels:
        raise RequestError(f"{_too_many_pixels(limits)} (this one: {width} x {height})")
    if max(width, height) > limits.max_edge:
        raise RequestError(
            f"it is {width} x {height} pixels large, and {limits.max_edge} is the limit for its "
            "width and for its height"
        )


def to_rgb(image: Image.Image, *, background: Colour = WHITE) -> Image.Image:
    """What is transparent shows the background. Deep greys are scaled: Pillow would clip them."""
    if image.mode in _DEEP_GREY_MODES:
        image = _scale_deep_grey(image)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode == "La":  # premultiplied grey, which has one way out
        image = image.convert("LA")
    colours = image.convert("RGBA")
    plain = Image.new("RGBA", colours.size, (*background, 255))
    return Image.alpha_composite(plain, colours).convert("RGB")


def open_image(data: bytes) -> Image.Image:
    """Nothing is decoded yet."""
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
    """Remove texts of a PNG from where Pillow expects something else.

    A PNG may have texts of any name. Pillow stores them beside its own values, so that a text can
    stand where it looks for a transparent colour, or for the bytes of notes.
    """
    for name in ("transparency", "exif", "xmp"):
        if isinstance(image.info.get(name), str):
            del image.info[name]


def check_webp_size(data: bytes, limits: MediaLimits) -> None:
    """WebP's decoder allocates its canvas when it is made, so its header is read here."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return
    size = read_webp_size(data)
    if size is None:
        raise RequestError(f"this is not {_KIND} that can be read: truncated or damaged")
    check_num_pixels(*size, limits)


def _too_many_pixels(limits: MediaLimits) -> str:
    return f"it has more than {limits.max_pixels} pixels, which is the limit"


def get_turn(read_exif: Callable[[], Image.Exif]) -> Image.Transpose | None:
    """What makes an image upright, by its EXIF data; `None` if it is."""
    try:
        orientation = read_exif().get(ExifTags.Base.Orientation)
    except DECODER_ERRORS:  # damaged notes beside good pixels
        return None
    return _TO_UPRIGHT.get(orientation) if isinstance(orientation, int) else None


def _turn_upright(image: Image.Image) -> Image.Image:
    turn = get_turn(image.getexif)
    return image if turn is None else image.transpose(turn)


def _scale_deep_grey(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, of whole numbers (I) and of fractions (F), to grey of 8 bits.

    I and F don't say how bright white is. Their values do: up to 1 (only F), 255 or 65535.
    """
    values: npt.NDArray[Any] = np.asarray(image)
    grey = Image.fromarray(_to_bytes(values, _find_white(image.mode, values)))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):  # the one value that is seen through
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


def _find_white(mode: str, values: npt.NDArray[Any]) -> int:
    if mode.startswith("I;16"):
        return 65535
    least, most = float(values.min()), float(values.max())
    if not (least >= 0 and most <= 65535):  # also true of values that are no numbers
        raise RequestError("its grey values are not between 0 and 65535")
    if mode == "F" and most <= 1:
        return 1
    return 255 if most <= 255 else 65535


def _to_bytes(values: npt.NDArray[Any], white: int) -> npt.NDArray[np.uint8]:
    if white == 65535 and values.dtype.kind in "iu":
        table = np.rint(np.arange(65536) * (255 / 65535)).astype(np.uint8)
        return np.take(table, values)
    scaled: npt.NDArray[np.uint8] = np.rint(values * (255 / white)).astype(np.uint8)
    return scaled
