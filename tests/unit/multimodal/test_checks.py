"""What may be given as a media item, and what is said of what may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sensorium.multimodal.checks import check_media
from sensorium.types.errors import RequestError

RATE = 16_000
SOUND = np.linspace(-0.5, 0.5, 400)
FRAMES = np.zeros((4, 8, 8, 3), dtype=np.uint8)


def check(modality: str, media: object) -> tuple[Any, Any]:
    return check_media(modality, media, sampling_rate=RATE, is_scaled_already=False)


@pytest.mark.parametrize(
    "sound",
    [
        SOUND,
        SOUND.astype(np.float32),
        torch.from_numpy(SOUND),
        (SOUND, RATE),
        SOUND[::-1].copy()[::-1],
        SOUND.astype(">f8"),
    ],
)
def test_sounds_become_float32_samples(sound: object) -> None:
    checked, metadata = check("audio", sound)
    assert metadata is None
    assert checked.dtype == np.float32
    np.testing.assert_allclose(checked, SOUND, atol=1e-7)


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_integer_samples_are_scaled_to_one(dtype: type) -> None:
    least = np.iinfo(dtype).min
    checked, _ = check("audio", np.array([least, 0, -(least // 2)], dtype=dtype))
    assert checked.tolist() == [-1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("sound", "message"),
    [
        ((SOUND, 44_100), "16000 samples a second, not 44100"),
        (SOUND.reshape(2, -1), "sounds are mono"),
        (np.zeros(0), "expected 1 non-empty dimensions"),
        ([0.0, 0.1], "an array of samples, not list"),
        ("sound.wav", "an array of samples, not str"),
        (np.array([0.1, np.nan]), "not finite"),
        (np.zeros(4, dtype=np.uint8), "not uint8"),
        (np.zeros(4, dtype=complex), "not complex128"),
    ],
)
def test_what_is_no_sound_is_refused(sound: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check("audio", sound)


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
        ({"fps": "fast"}, "fps must be a number above 0, not 'fast'"),
        ({"frames_indices": [0, 1]}, "2 frames_indices for 4 frames"),
        ({"frames_indices": [0, 1, 2, -3]}, "integers >= 0"),
        ({"speed": 2}, "unknown video metadata: speed"),
    ],
)
def test_wrong_metadata_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check("video", (FRAMES, metadata))
