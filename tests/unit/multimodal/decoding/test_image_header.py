"""The size that the header of an image claims, against what Pillow reads and what bombs claim."""

from __future__ import annotations

import random
import struct

import pytest
from PIL import Image

from sensorium.multimodal.decoding.images import open_image, read_header_size
from tests.integration.media_bombs import (
    LARGE,
    make_avif,
    make_bmp,
    make_gif,
    make_jpeg,
    make_tiff,
    make_webp,
)
from tests.support.media import make_images, make_pixels, make_png, write_image

FILES = make_images()


@pytest.mark.parametrize("name", FILES)
def test_the_size_is_the_one_that_pillow_reads(name: str) -> None:
    with open_image(FILES[name]) as image:
        assert read_header_size(FILES[name]) == image.size


def test_both_byte_orders_of_tiff_are_read() -> None:
    tags = struct.pack(">HHHIHHHHIHHI", 2, 256, 3, 1, 70, 0, 257, 4, 1, 0, 80, 0)
    assert read_header_size(b"MM\0*\0\0\0\x08" + tags) == (70, 80)


def test_the_size_that_a_decompression_bomb_claims_is_read() -> None:
    assert read_header_size(make_png(1, 100_000_000)) == (1, 100_000_000)
    assert read_header_size(make_tiff()) == (LARGE, LARGE)
    assert read_header_size(make_bmp()) == (LARGE, LARGE)
    assert read_header_size(make_gif()) == (65_535, 65_535)
    assert read_header_size(make_jpeg()) == (65_500, 65_500)
    assert read_header_size(make_webp(b"VP8X")) == (1 << 24, 1 << 24)
    assert read_header_size(make_webp(b"VP8L")) == (16_384, 16_384)
    assert read_header_size(make_webp(b"VP8 ")) == (16_383, 16_383)


@pytest.mark.skipif("AVIF" not in Image.SAVE, reason="Pillow was built without AVIF")
def test_the_largest_image_of_an_avif_file_counts() -> None:
    assert read_header_size(make_avif()) == (LARGE, LARGE)


def test_a_jpeg_of_endless_segments_is_given_up() -> None:
    data = b"\xff\xd8" + b"\xff\xe0\x00\x02" * 100_000
    assert read_header_size(data) is None


def test_cut_or_damaged_headers_raise_no_error() -> None:
    generator = random.Random(5)
    for data in FILES.values():
        for length in range(64):
            read_header_size(data[:length])
        for _ in range(200):
            damaged = bytearray(data[:512])
            for _ in range(generator.randrange(1, 20)):
                damaged[generator.randrange(len(damaged))] = generator.randrange(256)
            read_header_size(bytes(damaged))
    assert read_header_size(b"") is None
    assert read_header_size(b"no image at all, but some text") is None


def test_a_bmp_from_the_top_has_a_positive_height() -> None:
    data = write_image(make_pixels(), "BMP")
    upside_down = data[:22] + struct.pack("<i", -24) + data[26:]
    assert read_header_size(upside_down) == (40, 24)
