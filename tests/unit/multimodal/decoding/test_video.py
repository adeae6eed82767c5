"""Encoded videos to the frames that were chosen, and their metadata."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from sensorium.multimodal.decoding import video
from sensorium.multimodal.decoding.guards import WorkBudget
from sensorium.multimodal.decoding.video import Frames, Metadata, decode_video
from sensorium.multimodal.media import MediaLimits
from sensorium.types.errors import InvariantError, RequestError
from tests.support.media import (
    get_grey,
    make_clip,
    make_melody,
    make_videos,
    write_audio,
    write_image,
    write_video,
)

LIMITS = MediaLimits()


def choose_all(metadata: Mapping[str, Any]) -> Sequence[int]:
    return range(metadata["total_num_frames"])


def decode(
    data: bytes, choose: Any = choose_all, *, limits: MediaLimits = LIMITS
) -> tuple[Frames, Metadata]:
    return decode_video(data, choose_frames=choose, limits=limits)


def get_greys(frames: Frames) -> list[int]:
    return np.rint(frames.mean(axis=(1, 2, 3))).astype(int).tolist()


def assert_are(frames: Frames, indices: Sequence[int]) -> None:
    """Each frame is known by its grey, which lossy coding changes by a little."""
    assert len(frames) == len(indices)
    np.testing.assert_allclose(get_greys(frames), get_grey(np.array(indices)), atol=3)


@pytest.mark.parametrize("kind", sorted(make_videos()))
def test_every_kind_of_file_is_decoded(kind: str) -> None:
    frames, metadata = decode(make_videos()[kind])
    assert frames.dtype == np.uint8
    assert frames.shape == (6, 32, 48, 3)
    assert_are(frames, range(6))
    assert metadata == {
        "total_num_frames": 6,
        "fps": 10.0,
        "width": 48,
        "height": 32,
        "duration": 0.6,
        "video_backend": "pyav",
        "frames_indices": list(range(6)),
    }


@pytest.mark.parametrize("kind", ["GIF", "PNG"])
def test_animated_images_can_be_decoded_as_clips(kind: str) -> None:
    images = [Image.fromarray(pixels) for pixels in make_clip(4)]
    data = write_image(images[0], kind, save_all=True, append_images=images[1:], duration=100)
    frames, metadata = decode(data)
    assert_are(frames, range(4))
    assert metadata["fps"] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("indices", [[0], [5], [1, 4], [0, 0, 3, 5, 5], [2, 2]])
def test_chosen_frames_are_those_that_come_out(indices: list[int]) -> None:
    for kind in ("mp4 h264", "webm vp9"):
        frames, metadata = decode(make_videos()[kind], lambda _: indices)
        assert_are(frames, indices)
        assert metadata["frames_indices"] == indices
        assert metadata["total_num_frames"] == 6


def test_frames_of_a_reordered_clip_are_counted_as_they_are_shown() -> None:
    options = {"x264-params": "scenecut=0:bframes=3:b-adapt=0:keyint=100"}
    reordered = write_video(make_clip(20), "mp4", "libx264", codec_options=options)
    with av.open(io.BytesIO(reordered)) as container:
        pts = [packet.pts for packet in container.demux(video=0) if packet.pts is not None]
    assert pts != sorted(pts)
    frames, _ = decode(reordered, lambda _: [3, 4, 11, 19])
    assert_are(frames, [3, 4, 11, 19])


def test_pixels_are_those_of_the_library() -> None:
    clip = np.random.default_rng(0).integers(0, 256, (3, 30, 42, 3), dtype=np.uint8)
    data = write_video(clip, "mp4", "libx264")
    with av.open(io.BytesIO(data)) as container:
        expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    np.testing.assert_array_equal(decode(data)[0], np.stack(expected))


def test_decoding_stops_after_the_last_chosen_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[object] = []
    convert = video._to_pixels
    monkeypatch.setattr(
        video, "_to_pixels", lambda frame, kept: converted.append(frame) or convert(frame, kept)
    )
    _, num_decoded = video._read_frames(write_video(make_clip(30)), [1, 3], LIMITS, WorkBudget())
    assert num_decoded == 4
    assert len(converted) == 2


def test_fractional_frame_rates_are_kept() -> None:
    _, metadata = decode(write_video(make_clip(6), fps=Fraction(30_000, 1001)))
    assert metadata["fps"] == pytest.approx(29.97, abs=0.01)
    assert metadata["duration"] == pytest.approx(6 / 29.97, abs=0.001)


def test_a_clip_that_ends_early_is_a_shorter_clip() -> None:
    """The number of packets says more than there is: the frames are chosen again."""
    data = write_video(make_clip(12))
    asked: list[int] = []

    def choose(metadata: Mapping[str, Any]) -> Sequence[int]:
        asked.append(metadata["total_num_frames"])
        return [0, metadata["total_num_frames"] - 1]

    real = video._read_metadata
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            video,
            "_read_metadata",
            lambda *arguments: {**real(*arguments), "total_num_frames": 99},
        )
        frames, metadata = decode(data, choose)
    assert asked == [99, 12]
    assert_are(frames, [0, 11])
    assert metadata["total_num_frames"] == 12
    assert metadata["duration"] == pytest.approx(1.2)


def test_a_cut_file_is_a_shorter_clip_or_refused() -> None:
    data = write_video(make_clip(40), "matroska", "libx264", codec_options={"preset": "ultrafast"})
    lengths = []
    for cut in range(len(data) // 2, len(data), len(data) // 40):
        try:
            frames, metadata = decode(data[:cut])
        except RequestError:
            continue
        assert len(frames) == metadata["total_num_frames"]
        assert_are(frames, range(len(frames)))
        lengths.append(len(frames))
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 5


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
def test_clips_are_turned_as_their_header_says(num_turns: int) -> None:
    stored = np.zeros((2, 32, 48, 3), dtype=np.uint8)
    stored[:, :8] = 200  # a bright stripe at the top
    data = turn_header(write_video(stored), num_turns)
    frames, metadata = decode(data)
    expected = np.rot90(stored[0], num_turns)
    assert frames.shape[1:] == expected.shape
    assert (metadata["height"], metadata["width"]) == expected.shape[:2]
    assert np.abs(frames[0].astype(int) - expected).mean() < 8


def turn_header(data: bytes, num_turns: int) -> bytes:
    """The matrix of the track's header, in 16.16 fixed point, turned counter-clockwise."""
    one, minus = (1 << 16).to_bytes(4, "big"), (-(1 << 16)).to_bytes(4, "big", signed=True)
    zero = bytes(4)
    cells = {
        0: (one, zero, zero, one),
        1: (zero, minus, one, zero),
        2: (minus, zero, zero, minus),
        3: (zero, one, minus, zero),
    }[num_turns]
    start = data.index(b"tkhd") + 4 + 40
    plain = (one, zero, zero, zero, one)
    assert data[start : start + 20] == b"".join(plain)
    turned = (cells[0], cells[1], zero, cells[2], cells[3])
    return data[:start] + b"".join(turned) + data[start + 20 :]


def test_a_clip_may_change_its_size_on_its_way() -> None:
    small, large = (write_video(make_clip(2, *size), "mpegts") for size in ((32, 48), (64, 96)))
    frames, metadata = decode(small + large)
    assert frames.shape[1:] == (32, 48, 3)
    assert len(frames) == metadata["total_num_frames"] >= 3


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (MediaLimits(max_pixels=32 * 48 - 1), "more than 1535 pixels"),
        (MediaLimits(max_frames=5), "6 frames of this video would be used, but 5 is the limit"),
        (MediaLimits(max_video_pixels=6 * 32 * 48 - 1), "more than 9215 pixels"),
        (MediaLimits(max_duration_s=0.59), "longer than 0.59 seconds"),
    ],
)
def test_clips_over_a_limit_are_refused(limits: MediaLimits, message: str) -> None:
    for kind in ("mp4 h264", "webm vp8", "gif"):
        with pytest.raises(RequestError, match=message):
            decode(make_videos()[kind], limits=limits)


def test_limits_count_the_chosen_frames_only() -> None:
    limits = MediaLimits(max_frames=2, max_video_pixels=2 * 32 * 48, max_pixels=32 * 48)
    frames, _ = decode(make_videos()["mp4 h264"], lambda _: [1, 5], limits=limits)
    assert_are(frames, [1, 5])


@pytest.mark.parametrize("indices", [[], [6], [-1, 2], [3, 1]])
def test_an_impossible_choice_of_frames_is_an_invariant_error(indices: list[int]) -> None:
    with pytest.raises(InvariantError, match="frames chosen of 6"):
        decode(make_videos()["mp4 mpeg4"], lambda _: indices)


def test_what_is_no_video_is_refused() -> None:
    with pytest.raises(RequestError, match="no video track"):
        decode(write_audio(make_melody(400), "WAV", "PCM_16"))
    for data in (b"", b"hello", b"\0\0\0\x18ftypmp42"):
        with pytest.raises(RequestError, match=r"can't be (opened|decoded) as a video"):
            decode(data)
