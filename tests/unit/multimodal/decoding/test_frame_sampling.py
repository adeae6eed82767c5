"""The frames that a model sees of a clip are those that its own processor would have taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from sensorium.multimodal.decoding.video import Metadata, decode_video, make_frame_chooser
from sensorium.multimodal.media import MediaLimits
from tests.support.media import make_clip, write_video

MODELS = (
    "llava_onevision",
    "smolvlm",
    "internvl",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "glm4v",
    "gemma4",
    "qwen2_5_omni",
)
SAMPLING_MODELS = ("qwen3_vl", "glm4v", "gemma4")
CLIP = write_video(make_clip(40, 56, 84), "mp4", "mpeg4", fps=8)
LIMITS = MediaLimits()


@pytest.fixture(scope="module")
def load(tiny_model: Callable[[str], str]) -> Callable[[str], Any]:
    @cache
    def load_processor(model: str) -> Any:
        processor = AutoProcessor.from_pretrained(tiny_model(model))
        if model == "smolvlm":  # as published ones have it, which say it in a field of their own
            processor.video_processor.fps = 4
            processor.video_processor.num_frames = 6
        return processor

    return load_processor


def make_metadata(total_num_frames: int, *, fps: float = 8.0) -> Metadata:
    return {
        "total_num_frames": total_num_frames,
        "fps": fps,
        "width": 84,
        "height": 56,
        "duration": total_num_frames / fps,
        "video_backend": "pyav",
        "frames_indices": None,
    }


def call(processor: Any, frames: Any, metadata: Metadata, **options: Any) -> dict[str, Any]:
    output = processor(
        text=[processor.video_token],
        videos=[[frames]],
        video_metadata=[[metadata]],
        return_tensors="pt",
        **options,
    )
    return dict(output)


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value)), name


def assert_is_as_their_own_sampling(
    processor: Any, asked: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Frames chosen before decoding, against the whole clip and the processor's own choice."""
    choose = make_frame_chooser(processor.video_processor, asked)
    frames, metadata = decode_video(CLIP, choose_frames=choose, limits=LIMITS)
    assert 1 < len(frames) < 40
    everything, whole = decode_video(CLIP, choose_frames=lambda _: range(40), limits=LIMITS)
    # A requested rate reaches the model: Qwen 2.5 Omni's positions depend on it.
    passed = {name: value for name, value in asked.items() if name == "fps"}
    ours = call(processor, frames, metadata, do_sample_frames=False, **passed)
    theirs = call(processor, everything, whole, do_sample_frames=True, **expected)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("model", SAMPLING_MODELS)
def test_a_processor_that_samples_is_asked(load: Callable[[str], Any], model: str) -> None:
    assert load(model).video_processor.do_sample_frames
    assert_is_as_their_own_sampling(load(model), {}, {})


@pytest.mark.parametrize("model", [m for m in MODELS if m not in SAMPLING_MODELS])
def test_a_processor_that_samples_nothing_gets_a_bounded_number_of_frames(
    load: Callable[[str], Any], model: str
) -> None:
    own = {} if model == "smolvlm" else {"num_frames": 32}
    assert not load(model).video_processor.do_sample_frames
    assert_is_as_their_own_sampling(load(model), {}, own)


@pytest.mark.parametrize("model", MODELS)
def test_a_rate_that_is_asked_for_is_what_the_processor_makes_of_it(
    load: Callable[[str], Any], model: str
) -> None:
    # Gemma 4 has a number of its own, and can't have a rate in addition.
    expected = {"num_frames": 10} if model == "gemma4" else {"fps": 2.0}
    assert_is_as_their_own_sampling(load(model), {"fps": 2.0}, expected)


@pytest.mark.parametrize("model", [m for m in MODELS if m not in ("glm4v", "qwen3_vl")])
def test_a_number_that_is_asked_for_is_what_the_processor_makes_of_it(
    load: Callable[[str], Any], model: str
) -> None:
    assert_is_as_their_own_sampling(load(model), {"num_frames": 4}, {"num_frames": 4})


def test_a_requested_number_of_frames_holds_also_for_processors_that_sample_by_rate(
    load: Callable[[str], Any],
) -> None:
    choose = make_frame_chooser(load("glm4v").video_processor, {"num_frames": 4})
    assert list(choose(make_metadata(40))) == [0, 10, 20, 30]
    choose = make_frame_chooser(load("qwen3_vl").video_processor, {"num_frames": 4})
    assert list(choose(make_metadata(40))) == [0, 13, 26, 39]  # its rule: first and last are in


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("total_num_frames", [1, 2, 3, 5, 31])
@pytest.mark.parametrize("asked", [{}, {"num_frames": 32}, {"fps": 50.0}, {"fps": 0.01}])
def test_short_clips_and_odd_requests_give_existing_frames(
    load: Callable[[str], Any], model: str, total_num_frames: int, asked: dict[str, Any]
) -> None:
    choose = make_frame_chooser(load(model).video_processor, asked)
    indices = list(choose(make_metadata(total_num_frames)))
    assert indices == sorted(indices)
    assert indices
    assert indices[0] >= 0
    assert indices[-1] < total_num_frames


@pytest.mark.parametrize("model", MODELS)
def test_enormous_requested_numbers_cost_nothing(load: Callable[[str], Any], model: str) -> None:
    for asked in ({"fps": 1e300}, {"num_frames": 10**15}):
        choose = make_frame_chooser(load(model).video_processor, asked)
        assert len(choose(make_metadata(100))) <= 101


@pytest.mark.parametrize("model", MODELS)
def test_long_clips_are_bounded(load: Callable[[str], Any], model: str) -> None:
    choose = make_frame_chooser(load(model).video_processor, {})
    indices = choose(make_metadata(100_000, fps=30.0))
    assert len(indices) <= 768
    assert np.all(np.diff(indices) > 50)
