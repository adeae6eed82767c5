"""The size of an encoded image from its header: nothing is decoded.

It is the size that `images.decode_image` would give, or `None` where that can't be known before
pixels are: in other formats, in animations, and where notes on the orientation may stand behind
the pixels. Damage behind the header is not seen.
"""

from __future__ import annotations

import struct

from PIL import Image

from sensorium.multimodal.decoding.damage import refuse_damaged
from sensorium.multimodal.decoding.images import (
    DECODER_ERRORS,
    check_num_pixels,
    check_webp_size,
    get_turn,
    open_image,
)
from sensorium.multimodal.limits import MediaLimits
from sensorium.types.errors import RequestError

_FORMATS = ("PNG", "JPEG", "MPO", "WEBP")
_PNG_SIGNATURE_BYTES = 8
_PNG_HEADER = struct.Struct(">I4s")  # a chunk's length and name
_PNG_CRC_BYTES = 4
_SWAPPING = (
    Image.Transpose.TRANSPOSE,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSVERSE,
    Image.Transpose.ROTATE_90,
)


def read_image_size(data: bytes, *, limits: MediaLimits) -> tuple[int, int] | None:
    """Width and height, upright. A `RequestError` for what is no image, or too large."""
    if len(data) > limits.max_bytes:
        raise RequestError(f"it has more than {limits.max_bytes} bytes, which is the limit")
    with refuse_damaged("an image", *DECODER_ERRORS):
        check_webp_size(data, limits)
        with open_image(data) as image:
            check_num_pixels(*image.size, limits)
            if image.format not in _FORMATS or (image.format == "PNG" and not _is_plain_png(data)):
                return None
            # Not the image's own method: a PNG decodes itself to look behind its pixels.
            turn = get_turn(lambda: Image.Image.getexif(image))
            width, height = image.size
            return (height, width) if turn in _SWAPPING else (width, height)


def _is_plain_png(data: bytes) -> bool:
    """Whether it has one frame, and nothing but pixels behind the first of these."""
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
