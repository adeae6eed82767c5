"""Dummies are files that decoders take, and small."""

from __future__ import annotations

import numpy as np
import pytest

from sensorium.multimodal.decoding.decoding import decode, resolve_decode_options
from sensorium.multimodal.media import MediaLimits
from sensorium.multimodal.processing.dummy_media import make_dummy_file, make_dummy_media


@pytest.mark.parametrize("modality", ["image", "video", "audio"])
def test_a_dummy_file_decodes_to_what_the_dummy_is(modality: str) -> None:
    data = make_dummy_file(modality)
    assert len(data) < 200_000
    options = resolve_decode_options(modality, None)
    media, _ = decode(
        modality,
        data,
        options,
        limits=MediaLimits(),
        sampling_rate=16_000,
        choose_frames=lambda metadata: range(metadata["total_num_frames"]),
    )
    expected = np.asarray(make_dummy_media(modality, 16_000))
    assert np.asarray(media).shape == expected.shape
    if modality == "image":
        assert np.array_equal(np.asarray(media), expected)


def test_a_dummy_is_the_same_every_time() -> None:
    assert make_dummy_file("image") == make_dummy_file("image")
    assert make_dummy_file("audio") == make_dummy_file("audio")
