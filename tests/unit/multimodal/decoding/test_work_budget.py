"""What an attempt to decode an item may take, and how decoders keep to it."""

from __future__ import annotations

import math
import struct

import pytest

from sensorium.multimodal.decoding import guards
from sensorium.multimodal.decoding.audio import decode_audio
from sensorium.multimodal.decoding.decoding import decode, resolve_decode_options
from sensorium.multimodal.decoding.guards import (
    CostlyItemError,
    WorkBudget,
    estimate_audio_s,
    estimate_frames_s,
)
from sensorium.multimodal.decoding.images import decode_image
from sensorium.multimodal.decoding.video import decode_video
from sensorium.multimodal.media import MediaLimits
from sensorium.types.errors import RequestError
from tests.support.media import (
    RATE,
    make_clip,
    make_melody,
    make_pixels,
    write_audio,
    write_av_audio,
    write_image,
    write_video,
)

LIMITS = MediaLimits()


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes with every look at the clock."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(guards.time, "monotonic", lambda: float(next(seconds)))


def test_estimates_increase_with_the_work() -> None:
    picture = estimate_frames_s(1, 1000, 1000)
    assert picture < estimate_frames_s(1, 2000, 1000) < estimate_frames_s(50, 2000, 1000)
    assert estimate_frames_s(100_000, 1, 1) > 1.0  # even the smallest frames cost something
    assert estimate_audio_s(60.0) < estimate_audio_s(3600.0)


def test_more_work_than_is_allowed_is_refused_before_it_is_done() -> None:
    budget = WorkBudget(max_cost_s=1.0)
    budget.expect(1.0)
    with pytest.raises(CostlyItemError) as caught:
        budget.expect(7.5)
    assert caught.value.cost_s == 7.5


def test_work_adds_up_whatever_was_expected() -> None:
    budget = WorkBudget(max_cost_s=1.0)
    budget.expect(0.1)
    for _ in range(4):
        budget.spend(0.25)
    with pytest.raises(CostlyItemError):
        budget.spend(0.01)


@pytest.mark.usefixtures("pass_time")
def test_decoders_end_by_themselves_at_their_deadline() -> None:
    message = "the file could not be decoded within 5 seconds, which is the limit"
    with pytest.raises(RequestError, match=message):
        decode_video(
            write_video(make_clip(30)),
            choose_frames=lambda metadata: range(metadata["total_num_frames"]),
            limits=LIMITS,
            budget=WorkBudget(deadline_s=5.0),
        )
    audio = write_av_audio(make_melody(RATE), "mp3", "libmp3lame")
    with pytest.raises(RequestError, match=message):
        decode_audio(audio, sampling_rate=RATE, limits=LIMITS, budget=WorkBudget(deadline_s=5.0))


def test_a_long_video_is_detected_before_a_frame_is_decoded() -> None:
    budget = WorkBudget(max_cost_s=0.001)
    with pytest.raises(CostlyItemError) as caught:
        decode_video(
            write_video(make_clip(60)),
            choose_frames=lambda _: [1, 49],
            limits=LIMITS,
            budget=budget,
        )
    assert caught.value.cost_s == pytest.approx(estimate_frames_s(50, 48, 32))
    assert budget._spent_s == 0.0


def test_long_audio_is_detected_by_its_header_or_while_it_is_decoded() -> None:
    melody = make_melody(10 * RATE)
    options = resolve_decode_options("audio", None)
    for kind in ("WAV", "raw aac"):
        is_wav = kind == "WAV"
        audio = (
            write_audio(melody, kind, "PCM_16") if is_wav else write_av_audio(melody, "adts", "aac")
        )
        budget = WorkBudget(max_cost_s=estimate_audio_s(5.0))
        with pytest.raises(CostlyItemError):
            decode("audio", audio, options, limits=LIMITS, sampling_rate=RATE, budget=budget)


def test_a_large_picture_is_detected_before_it_is_decoded() -> None:
    data = write_image(make_pixels(100, 200), "PNG")
    with pytest.raises(CostlyItemError):
        decode_image(data, limits=LIMITS, budget=WorkBudget(max_cost_s=1e-6))
    assert decode_image(data, limits=LIMITS, budget=WorkBudget(max_cost_s=math.inf))


def test_a_video_whose_frames_are_too_many_pixels_in_all_is_refused_with_the_numbers() -> None:
    limits = MediaLimits(max_decoded_pixels=20 * 48 * 32)
    video = write_video(make_clip(60))
    frames, _ = decode_video(video, choose_frames=lambda _: [0, 19], limits=limits)
    assert len(frames) == 2
    message = "would have to be decoded, which have 32256 pixels in all, but 30720 is the limit"
    with pytest.raises(RequestError, match=message):
        decode_video(video, choose_frames=lambda _: [20], limits=limits)


def make_caf(num_samples: int, *, rate: float = 16_000.0) -> bytes:
    """Return audio of two channels that has every sample in a packet of its own."""
    data = bytes(4 * num_samples)
    form = struct.pack(">d", rate) + b"lpcm" + struct.pack(">IIIII", 2, 4, 1 << 24, 2, 16)
    head = b"caff\0\1\0\0desc" + struct.pack(">Q", len(form)) + form
    return head + b"data" + struct.pack(">Q", len(data) + 4) + bytes(4) + data


def test_short_audio_of_many_packets_counts_as_long_work() -> None:
    with pytest.raises(CostlyItemError):
        decode_audio(
            make_caf(20_000), sampling_rate=RATE, limits=LIMITS, budget=WorkBudget(max_cost_s=0.5)
        )
    budget = WorkBudget(max_cost_s=60.0)
    assert len(decode_audio(make_caf(500), sampling_rate=16_000, limits=LIMITS, budget=budget))
