"""Encoded images to upright RGB pixels, whatever their format and colours."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps, PngImagePlugin, features

from sensorium.multimodal.decoding.images import decode_image
from sensorium.multimodal.media import MediaLimits
from sensorium.multimodal.names import MediaHasher
from sensorium.types.errors import RequestError
from tests.support.media import make_images, make_pixels, make_png, write_image

LIMITS = MediaLimits()
PIXELS = make_pixels()
RED, GREEN = (255, 0, 0), (0, 255, 0)


def decode(data: bytes) -> np.ndarray:
    image = decode_image(data, limits=LIMITS)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "WEBP"])
def test_lossless_formats_give_the_pixels_that_were_written(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    np.testing.assert_array_equal(decode(write_image(PIXELS, kind, **options)), PIXELS)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "AVIF"])
def test_lossy_formats_give_nearly_the_pixels_that_were_written(kind: str) -> None:
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    decoded = decode(write_image(PIXELS, kind, quality=95))
    assert np.abs(decoded.astype(int) - PIXELS).mean() < 5


def test_every_kind_of_file_is_decoded() -> None:
    for kind, data in make_images().items():
        assert decode(data).shape[2] == 3, kind


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_turned_as_their_exif_data_says(kind: str, orientation: int) -> None:
    """A red stripe at the top and a green one at the left distinguish the eight orientations."""
    upright = np.zeros((24, 40, 3), dtype=np.uint8)
    upright[:, :8] = GREEN
    upright[:8] = RED
    image = Image.fromarray(upright)
    stored = {
        1: image,
        2: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: image.transpose(Image.Transpose.ROTATE_180),
        4: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: image.transpose(Image.Transpose.TRANSPOSE),
        6: image.transpose(Image.Transpose.ROTATE_90),
        7: image.transpose(Image.Transpose.TRANSVERSE),
        8: image.transpose(Image.Transpose.ROTATE_270),
    }[orientation]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    turned = decode_image(write_image(stored, kind, exif=exif), limits=LIMITS)
    decoded = np.asarray(ImageOps.exif_transpose(turned))  # which must not turn it again
    assert decoded.shape == upright.shape
    assert np.abs(decoded.astype(int) - upright).mean() < 12


def test_damaged_exif_data_does_not_spoil_good_pixels() -> None:
    data = write_image(PIXELS, "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    np.testing.assert_array_equal(decode(data), PIXELS)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_what_is_transparent_shows_the_background(kind: str) -> None:
    image = Image.new("RGBA", (8, 8), (100, 0, 0, 51))
    options = {"lossless": True} if kind == "WEBP" else {}
    data = write_image(image, kind, **options)
    assert decode(data)[0, 0].tolist() == [224, 204, 204]
    on_blue = decode_image(data, limits=LIMITS, background=(0, 0, 255))
    assert on_blue.getpixel((0, 0)) == (20, 0, 204)


def test_transparent_colours_of_a_palette_show_the_background() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([255, 0, 0, 0, 255, 0])
    for kind in ("PNG", "GIF"):
        seen_through = decode(write_image(image, kind, transparency=1))
        assert seen_through[0, 0].tolist() == [255, 255, 255]
        assert decode(write_image(image, kind))[0, 0].tolist() == [0, 255, 0]


def test_grey_with_transparency_shows_the_background() -> None:
    grey = Image.new("LA", (4, 4), (0, 128))
    assert decode(write_image(grey, "PNG"))[0, 0].tolist() == [127, 127, 127]
    single = write_image(Image.new("L", (4, 4), 7), "PNG", transparency=7)
    assert decode(single)[0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_of_16_bits_is_scaled_and_not_clipped(kind: str) -> None:
    deep = np.array([[0, 128, 257, 32_768, 65_535]], dtype=np.uint16)
    expected = [0, 0, 1, 128, 255]
    assert decode(write_image(Image.fromarray(deep), kind))[0, :, 0].tolist() == expected


def test_grey_of_16_bits_with_a_transparent_value_shows_the_background() -> None:
    rows = b"".join(b"\0" + struct.pack(">HH", 1000, 40_000) for _ in range(2))
    header = struct.pack(">IIBBBBB", 2, 2, 16, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"tRNS", struct.pack(">H", 1000)), (b"IDAT", zlib.compress(rows))]
    data = b"\x89PNG\r\n\x1a\n"
    for name, content in [*chunks, (b"IEND", b"")]:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        data += struct.pack(">I", len(content)) + name + content + checksum
    assert decode(data)[0, :, 0].tolist() == [255, 156]


def test_colours_of_16_bits_are_scaled() -> None:
    rows = b"\0" + struct.pack(">HHH", 65_535, 32_768, 256)
    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for name, content in [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        data += struct.pack(">I", len(content)) + name + content + checksum
    assert decode(data)[0, 0].tolist() == [255, 128, 1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 127.6, 255.0], [0, 128, 255]),
        ([0.0, 32_768.0, 65_535.0], [0, 128, 255]),
    ],
)
def test_the_brightest_value_says_what_white_is_in_fractions(
    values: list[float], expected: list[int]
) -> None:
    data = write_image(Image.fromarray(np.array([values], dtype=np.float32)), "TIFF")
    assert decode(data)[0, :, 0].tolist() == expected


@pytest.mark.parametrize(
    ("values", "expected"), [([0, 1, 255], [0, 1, 255]), ([0, 32_768, 65_535], [0, 128, 255])]
)
def test_the_brightest_value_says_what_white_is_in_whole_numbers(
    values: list[int], expected: list[int]
) -> None:
    data = write_image(Image.fromarray(np.array([values], dtype=np.int32)), "TIFF")
    assert decode(data)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("values", [[-1.0, 1.0], [0.0, np.nan], [0.0, 1e6]])
def test_grey_without_a_known_white_is_refused(values: list[float]) -> None:
    data = write_image(Image.fromarray(np.array([values], dtype=np.float32)), "TIFF")
    with pytest.raises(RequestError, match="grey values are not between 0 and 65535"):
        decode(data)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("1", "TIFF"),
        ("L", "TIFF"),
        ("P", "TIFF"),
        ("CMYK", "TIFF"),
        ("L", "JPEG"),
        ("CMYK", "JPEG"),
    ],
)
def test_other_colour_modes_become_the_colours_that_they_show(mode: str, kind: str) -> None:
    image = Image.fromarray(PIXELS).convert(mode)
    decoded = decode(write_image(image, kind))
    assert np.abs(decoded.astype(int) - np.asarray(image.convert("RGB"))).mean() < 5


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_decoded(kind: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = write_image(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert decode(data)[8, 8].tolist() == list(RED)


def test_the_first_picture_of_a_file_with_two_is_decoded() -> None:
    """As many phones write them."""
    images = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN)]
    data = write_image(images[0], "MPO", save_all=True, append_images=images[1:])
    assert np.abs(decode(data)[8, 8].astype(int) - RED).max() < 5


@pytest.mark.parametrize("kind", sorted(make_images()))
def test_a_truncated_file_is_refused(kind: str) -> None:
    data = make_images()[kind]
    frames = 3 if kind in ("gif", "apng", "webp animated") else 1  # the first is all that is read
    with pytest.raises(
        RequestError, match="can't be decoded as an image: it is truncated or damaged"
    ):
        decode(data[: len(data) // (2 * frames)])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"%PDF-1.7",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"P6 1 1 255\n...",
    ],
)
def test_other_formats_are_refused_by_name_of_those_that_are_read(data: bytes) -> None:
    with pytest.raises(RequestError, match=r"not an image of a supported format .*PNG, JPEG"):
        decode(data)


def test_our_pixel_limit_counts_and_not_that_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_image(PIXELS, "PNG")
    num_pixels = PIXELS.shape[0] * PIXELS.shape[1]
    decode_image(data, limits=MediaLimits(max_pixels=num_pixels))
    with pytest.raises(RequestError, match=f"more than {num_pixels - 1} pixels.*40 x 24"):
        decode_image(data, limits=MediaLimits(max_pixels=num_pixels - 1))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    np.testing.assert_array_equal(decode(data), PIXELS)


def test_text_chunks_that_unpack_to_too_much_are_refused() -> None:
    bomb = zlib.compress(bytes(100_000_000))
    for name, content in [
        (b"zTXt", b"note\0\0" + bomb),
        (b"iTXt", b"note\0\1\0\0\0" + bomb),
    ]:
        with pytest.raises(RequestError, match="truncated or damaged"):
            decode(make_png(4, 4, (name, content)))


def test_messages_do_not_mention_the_library() -> None:
    for data in (make_images()["png"][:50], make_images()["tiff lzw"][:100], b"\x89PNG\r\n\x1a\n"):
        with pytest.raises(RequestError) as caught:
            decode(data)
        assert not any(word in str(caught.value) for word in ("PIL", "0x", "Bytes", "/", "Error"))


@pytest.mark.parametrize("name", ["xmp", "exif", "transparency", "icc_profile"])
@pytest.mark.parametrize("is_compressed", [True, False])
def test_texts_of_a_png_may_have_any_name(name: str, is_compressed: bool) -> None:
    notes = PngImagePlugin.PngInfo()
    notes.add_text(name, "hello", zip=is_compressed)
    np.testing.assert_array_equal(decode(write_image(PIXELS, "PNG", pnginfo=notes)), PIXELS)


def set_type(tiff: bytes, tag: int, kind: int) -> bytes:
    """Return the file with another type of this tag's values."""
    (start,) = struct.unpack_from("<I", tiff, 4)
    (num_tags,) = struct.unpack_from("<H", tiff, start)
    changed = bytearray(tiff)
    for place in range(start + 2, start + 2 + 12 * num_tags, 12):
        if struct.unpack_from("<H", tiff, place) == (tag,):
            struct.pack_into("<H", changed, place + 2, kind)
    return bytes(changed)


# Where the pixels are, and notes; as a text, a ratio and a fraction.
@pytest.mark.parametrize(("tag", "kind"), [(273, 2), (273, 5), (273, 11), (700, 5), (700, 11)])
def test_tags_of_wrong_types_are_the_files_fault(tag: int, kind: int) -> None:
    tiff = write_image(PIXELS, "TIFF", tiffinfo={700: b"some notes beside the pixels"})
    with pytest.raises(RequestError, match="truncated or damaged"):
        decode(set_type(tiff, tag, kind))
    in_process = Image.open(io.BytesIO(set_type(tiff, tag, kind)))
    with pytest.raises(RequestError, match="damaged or truncated"):
        MediaHasher().digest_source(in_process)
