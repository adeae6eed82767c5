"""How much work an item will be, without decoding it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sensorium.multimodal.media import MediaBytes, MediaLimits
from sensorium.multimodal.processing.item_backend import estimate_cost_s
from sensorium.types.errors import RequestError
from tests.integration.media_bombs import BOMBS
from tests.support.media import make_clip, make_pixels, make_png, write_image, write_video

LIMITS = MediaLimits()
HEADER_BOMBS = [
    name
    for name, (modality, _) in BOMBS.items()
    if modality == "image" and name not in ("png note", "png profile")
]


def test_a_picture_has_an_estimate_from_its_header() -> None:
    small = MediaBytes(write_image(make_pixels(10, 20), "PNG"))
    large = MediaBytes(make_png(8000, 8000))
    small_s = estimate_cost_s("image", small, LIMITS)
    large_s = estimate_cost_s("image", large, LIMITS)
    assert small_s is not None
    assert large_s is not None
    assert small_s < 0.01 < 0.5 < large_s


def test_video_and_audio_have_no_estimate_without_a_decoder() -> None:
    video = MediaBytes(write_video(make_clip(6)))
    assert estimate_cost_s("video", video, LIMITS) is None
    assert estimate_cost_s("audio", video, LIMITS) is None
    assert estimate_cost_s("image", MediaBytes(b"nothing"), LIMITS) is None


@pytest.mark.parametrize("name", HEADER_BOMBS)
def test_pictures_of_impossible_sizes_are_refused_before_queueing(name: str) -> None:
    with pytest.raises(RequestError, match="pixels, which is the limit"):
        estimate_cost_s("image", MediaBytes(BOMBS[name][1]()), LIMITS)


def test_a_thin_picture_is_refused_by_its_longer_side() -> None:
    picture = MediaBytes(make_png(1, 100_000_000))
    assert len(picture.data) < 100
    with pytest.raises(RequestError, match="1 x 100000000 pixels large, but 65535 is"):
        estimate_cost_s("image", picture, LIMITS)
    assert estimate_cost_s("image", MediaBytes(make_png(65_535, 10)), LIMITS) is not None


@pytest.mark.parametrize(
    ("modality", "media"),
    [
        ("image", Image.new("RGB", (100, 50))),
        ("image", np.zeros((50, 100, 3), dtype=np.uint8)),
        ("video", torch.zeros(2, 3, 50, 50)),
        ("video", [Image.new("RGB", (50, 50))] * 2),
        ("video", (np.zeros((2, 50, 50, 3)), {"fps": 2.0})),
        ("audio", (np.zeros(16_000), 16_000)),
        ("image", "no picture"),
    ],
)
def test_media_in_process_has_an_estimate_by_its_size(modality: str, media: Any) -> None:
    cost_s = estimate_cost_s(modality, media, LIMITS)
    assert cost_s is not None
    assert 0 <= cost_s < 0.1
