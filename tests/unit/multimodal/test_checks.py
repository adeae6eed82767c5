"""What may be given as a media item, and what is said of what may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from sensorium.multimodal.media import MediaLimits
from sensorium.multimodal.processing.checks import check_media
from sensorium.types.errors import RequestError
from tests.support.media import make_melody

RATE = 16_000
AUDIO = np.linspace(-0.5, 0.5, 400)
FRAMES = np.zeros((4, 8, 8, 3), dtype=np.uint8)


def check(modality: str, media: object) -> tuple[Any, Any]:
    return check_media(
        modality, media, sampling_rate=RATE, is_scaled_already=False, limits=MediaLimits()
    )


@pytest.mark.parametrize(
    "audio",
    [
        AUDIO,
        AUDIO.astype(np.float32),
        torch.from_numpy(AUDIO),
        (AUDIO, RATE),
        AUDIO[::-1].copy()[::-1],
        AUDIO.astype(">f8"),
    ],
)
def test_audio_becomes_float32_samples(audio: object) -> None:
    checked, metadata = check("audio", audio)
    assert metadata is None
    assert checked.dtype == np.float32
    np.testing.assert_allclose(checked, AUDIO, atol=1e-7)


def test_channels_are_mixed_down_in_either_axis_order() -> None:
    stereo = np.stack([AUDIO, np.zeros(400)])
    for audio in (stereo, stereo.T, torch.from_numpy(stereo), (stereo, RATE)):
        checked, _ = check("audio", audio)
        np.testing.assert_allclose(checked, AUDIO / 2, atol=1e-7)
    short = np.array([[1.0, 0.5], [0.0, 0.5]])  # as many channels as samples: channels are rows
    assert check("audio", short)[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("rate", [8_000, 44_100, np.int64(48_000), 44_100.0])
def test_audio_of_another_rate_is_resampled(rate: Any) -> None:
    melody = make_melody(int(rate) // 2, rate=int(rate))
    checked, _ = check("audio", (melody, rate))
    expected = make_melody(RATE // 2)
    assert checked.shape == expected.shape
    assert checked.dtype == np.float32
    # A resampler rings where audio begins and ends, and nowhere else.
    np.testing.assert_allclose(checked[500:-500], expected[500:-500], atol=1e-3)


def test_long_and_large_items_are_refused_by_the_limits() -> None:
    limits = MediaLimits(max_pixels=100, max_frames=3, max_video_pixels=250, max_duration_s=0.02)
    cases: list[tuple[str, object, str]] = [
        ("audio", AUDIO, "longer than 0.02 seconds"),
        ("audio", (AUDIO[:200], 8_000), "longer than 0.02 seconds"),
        ("image", Image.new("RGB", (10, 11)), "more than 100 pixels"),
        ("image", np.zeros((10, 11, 3), dtype=np.uint8), "more than 100 pixels"),
        ("image", np.zeros((3, 10, 11), dtype=np.uint8), "more than 100 pixels"),
        ("image", torch.zeros(10, 11), "more than 100 pixels"),
        ("video", FRAMES, "4 frames of this video would be used, but 3 is the limit"),
        ("video", list(FRAMES), "has 4 frames, but 3 is the limit"),
        ("video", np.zeros((3, 10, 10, 3), dtype=np.uint8), "more than 250 pixels"),
        ("video", np.zeros((3, 3, 10, 10), dtype=np.uint8), "more than 250 pixels"),
    ]
    for modality, media, message in cases:
        with pytest.raises(RequestError, match=message):
            check_media(modality, media, sampling_rate=RATE, is_scaled_already=False, limits=limits)
    check_media("video", FRAMES[:3], sampling_rate=RATE, is_scaled_already=False, limits=limits)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((8, 8, 3), dtype=complex), "not complex128s"),
        (np.zeros((8, 8, 3), dtype=np.uint16), "not uint16s"),
        (torch.zeros(3, 8, 8, dtype=torch.complex64), "not complex64s"),
        (np.full((8, 8, 3), -1), "not from -1 to -1"),
        (np.full((8, 8, 3), 256.0), "not from 256 to 256"),
        (torch.full((3, 8, 8), 1000), "not from 1000 to 1000"),
        (np.full((8, 8, 3), np.nan), "not finite"),
        (torch.zeros(3, 8, 8, device="meta"), "a plain tensor"),
        (torch.ones(8, 8).to_sparse(), "a plain tensor"),
    ],
)
def test_arrays_that_are_no_pixels_are_refused(pixels: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check("image", pixels)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.float16, np.float64])
def test_pixels_from_0_to_255_are_taken_as_they_are(dtype: type) -> None:
    pixels = np.arange(192).reshape(8, 8, 3).astype(dtype)
    checked, _ = check("image", pixels)
    assert checked.dtype == dtype
    np.testing.assert_array_equal(checked, pixels)


def test_scaled_pixels_may_be_anything_when_they_are_said_to_be() -> None:
    pixels = np.linspace(-2, 2, 192).reshape(8, 8, 3)
    checked, _ = check_media(
        "image", pixels, sampling_rate=RATE, is_scaled_already=True, limits=MediaLimits()
    )
    np.testing.assert_array_equal(checked, pixels)


def test_sixteen_bit_grey_is_scaled_and_exif_is_ignored() -> None:
    deep = Image.fromarray(np.full((4, 4), 32_768, dtype=np.uint16))
    assert check("image", deep)[0].getpixel((0, 0)) == (128, 128, 128)
    turned = Image.new("RGB", (4, 8))
    turned.getexif()[ExifTags.Base.Orientation] = 6
    assert check("image", turned)[0].size == (4, 8)


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_integer_samples_are_scaled_to_one(dtype: type) -> None:
    least = np.iinfo(dtype).min
    checked, _ = check("audio", np.array([least, 0, -(least // 2)], dtype=dtype))
    assert checked.tolist() == [-1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        ((AUDIO, 0), "from 1000 to 768000 samples a second, not 0"),
        ((AUDIO, "fast"), "samples a second, not 'fast'"),
        ((AUDIO, 16_000.5), "samples a second, not 16000.5"),
        ((AUDIO, True), "samples a second, not True"),
        (np.zeros((300, 300)), r"\(300, 300\) is no shape of audio"),
        (np.zeros((2, 2, 400)), "expected 1 or 2 non-empty dimensions"),
        (np.zeros(0), "expected 1 or 2 non-empty dimensions"),
        (torch.zeros(400).to_sparse(), "a plain tensor"),
        (np.array([0.1, np.inf]), "not finite"),
        (np.array([0.1, 1e300]), "not finite"),
        ([0.0, 0.1], "an array of samples, not list"),
        ("sound.wav", "an array of samples, not str"),
        (np.array([0.1, np.nan]), "not finite"),
        (np.zeros(4, dtype=np.uint8), "not uint8"),
        (np.zeros(4, dtype=complex), "not complex128"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "not complex64"),
        (torch.zeros(4).to(torch.float8_e4m3fn), "not float8_e4m3fn"),
    ],
)
def test_what_is_no_audio_is_refused(audio: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check("audio", audio)


def test_frames_may_come_with_metadata() -> None:
    checked, metadata = check("video", (FRAMES, {"fps": 2.0}))
    assert len(checked) == 4
    assert metadata == {"total_num_frames": 4, "fps": 2.0, "frames_indices": [0, 1, 2, 3]}
    _, given = check("video", (FRAMES, {"fps": 8, "frames_indices": np.array([0, 5, 9, 30])}))
    assert given["frames_indices"] == [0, 5, 9, 30]


def test_frames_without_metadata_have_none() -> None:
    assert check("video", FRAMES)[1] is None
    assert check("video", list(FRAMES))[1] is None


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"fps": 0}, "fps must be a number above 0"),
        ({"total_num_frames": "x"}, "total_num_frames must be an integer above 0, not 'x'"),
        ({"fps": "fast"}, "fps must be a number above 0, not 'fast'"),
        ({"frames_indices": [0, 1]}, "2 frames_indices for 4 frames"),
        ({"frames_indices": [0, 1, 2, -3]}, "integers >= 0"),
        ({"speed": 2}, "unknown video metadata: speed"),
    ],
)
def test_wrong_metadata_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check("video", (FRAMES, metadata))
