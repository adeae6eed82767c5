"""Options of decoding: complete, plain and checked; and one door to the three decoders."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sensorium.multimodal.decoding.decoding import decode, resolve_decode_options
from sensorium.multimodal.media import MediaLimits
from sensorium.types.errors import InvariantError, RequestError
from tests.support.media import RATE, make_clip, make_melody, write_audio, write_image, write_video

LIMITS = MediaLimits()


@pytest.mark.parametrize(
    ("modality", "given", "expected"),
    [
        ("image", None, {"version": 1, "background": [255, 255, 255]}),
        ("image", {}, {"version": 1, "background": [255, 255, 255]}),
        ("image", {"image": None}, {"version": 1, "background": [255, 255, 255]}),
        (
            "image",
            {"image": {"background": (1, 2, 3)}},
            {"version": 1, "background": [1, 2, 3]},
        ),
        (
            "image",
            {"image": {"rgba_background_color": [1, 2, 3]}, "video": {"fps": 3}},
            {"version": 1, "background": [1, 2, 3]},
        ),
        ("audio", {"image": {"background": [1, 2, 3]}}, {"version": 1}),
        ("video", None, {"version": 1, "fps": None, "num_frames": None}),
        ("video", {"video": {"fps": 2}}, {"version": 1, "fps": 2.0, "num_frames": None}),
        (
            "video",
            {"video": {"num_frames": 8, "fps": None}},
            {"version": 1, "fps": None, "num_frames": 8},
        ),
    ],
)
def test_options_are_complete_and_plain(modality: str, given: Any, expected: Any) -> None:
    resolved = resolve_decode_options(modality, given)
    assert resolved == expected
    assert json.loads(json.dumps(resolved)) == expected


@pytest.mark.parametrize(
    ("modality", "given", "message"),
    [
        ("image", [], "must map modalities"),
        ("image", {"smell": {}}, r"must map modalities \(image, audio, video\)"),
        ("image", {"image": 3}, "image: must map names of options to values, not 3"),
        ("image", {"image": {"blur": 1}}, "image: unknown option blur"),
        ("audio", {"audio": {"rate": 1}}, "audio: unknown option rate"),
        ("image", {"image": {"background": "red"}}, "three whole numbers from 0 to 255"),
        ("image", {"image": {"background": [0, 0, 256]}}, "three whole numbers from 0 to 255"),
        ("image", {"image": {"background": [0, 0, True]}}, "three whole numbers from 0 to 255"),
        ("image", {"image": {"background": [0, 0]}}, "three whole numbers from 0 to 255"),
        ("video", {"video": {"fps": 0}}, "fps: must be a number above 0, not 0"),
        ("video", {"video": {"fps": "2"}}, "fps: must be a number above 0, not '2'"),
        ("video", {"video": {"fps": float("inf")}}, "fps: must be a number above 0, not inf"),
        ("video", {"video": {"fps": 10**400}}, "fps: must be a number above 0, not 1000"),
        ("video", {"video": {"fps": True}}, "fps: must be a number above 0, not True"),
        (
            "video",
            {"video": {"num_frames": -1}},
            "num_frames: must be a whole number above 0, not -1",
        ),
        (
            "video",
            {"video": {"num_frames": 2.0}},
            r"num_frames: must be a whole number above 0, not 2\.0",
        ),
        (
            "video",
            {"video": {"fps": 1, "num_frames": 2}},
            "either fps or num_frames may be given, but not both",
        ),
    ],
)
def test_wrong_options_are_refused_by_name(modality: str, given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        resolve_decode_options(modality, given)


def test_each_modality_has_its_decoder() -> None:
    image, nothing = decode(
        "image",
        write_image(Image.new("RGBA", (4, 4)), "PNG"),
        resolve_decode_options("image", {"image": {"background": [1, 2, 3]}}),
        limits=LIMITS,
    )
    assert isinstance(image, Image.Image)
    assert image.getpixel((0, 0)) == (1, 2, 3)
    assert nothing is None
    audio, nothing = decode(
        "audio",
        write_audio(make_melody(400), "WAV", "PCM_16"),
        resolve_decode_options("audio", None),
        limits=LIMITS,
        sampling_rate=RATE,
    )
    assert isinstance(audio, np.ndarray)
    assert audio.shape == (400,)
    assert nothing is None
    frames, metadata = decode(
        "video",
        write_video(make_clip(4)),
        resolve_decode_options("video", None),
        limits=LIMITS,
        choose_frames=lambda _: [1, 2],
    )
    assert isinstance(frames, np.ndarray)
    assert frames.shape == (2, 32, 48, 3)
    assert metadata is not None
    assert metadata["frames_indices"] == [1, 2]


def test_decoding_without_the_needs_of_the_model_is_an_invariant_error() -> None:
    for modality in ("audio", "video"):
        with pytest.raises(InvariantError, match="without a sampling rate or a frame chooser"):
            decode(modality, b"", resolve_decode_options(modality, None), limits=LIMITS)


def test_large_files_are_refused_unread() -> None:
    data = write_image(Image.new("RGB", (4, 4)), "PNG")
    with pytest.raises(RequestError, match="more than 10 bytes"):
        decode(
            "image",
            data,
            resolve_decode_options("image", None),
            limits=MediaLimits(max_bytes=10),
        )
