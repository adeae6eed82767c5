"""Decodes the frames of a video that the model's processor chooses.

The processor's own rule for sampling is called before anything is decoded. A processor that samples
nothing by default would take every frame of a clip. Its rule is called with a bounded number.

The clip is read once without decoding, to count its frames, and then decoded in order up to the
last chosen frame. The number of pixels to decode is checked before the first one is decoded. Only
chosen frames are kept, in an array that is allocated once after its size was checked.

A clip may have fewer frames than packets (hidden frames, a truncated file). Then the frames are
chosen again among those that exist, and decoded again, as if the clip's header gave the true
number. A clip with an error in the middle is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sensorium.multimodal.decoding.guards import (
    WorkBudget,
    check_duration,
    estimate_frames_s,
    get_decoder_options,
    get_first_stream,
    open_container,
    refuse_if_longer,
)
from sensorium.multimodal.decoding.images import check_num_pixels
from sensorium.multimodal.media import MediaLimits
from sensorium.types.errors import InvariantError, RequestError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream


_DEFAULT_NUM_FRAMES = 32


def make_frame_chooser(video_processor: Any, options: Mapping[str, object]) -> ChooseFrames:
    """Return a function that picks the frames of a video to keep, given the clip's metadata.

    It calls `sample_frames` of Transformers' video processor, with that processor's own settings
    and the `fps` or `num_frames` in `options`. If that fails (for a clip with too few frames, or
    because it can't have both a rate and a number), it is called again with a number of frames that
    the clip has. If that also fails, the frames are spread evenly.
    """
    asked: dict[str, Any] = {
        name: options[name] for name in ("fps", "num_frames") if options.get(name) is not None
    }
    own = {"fps": video_processor.fps, "num_frames": video_processor.num_frames}
    if not asked and not (video_processor.do_sample_frames or any(own.values())):
        asked = {"num_frames": _DEFAULT_NUM_FRAMES}

    def choose_frames(metadata: Mapping[str, Any]) -> Sequence[int]:
        num_frames = _count_frames(metadata, **(asked or own))
        # `sample_frames` ignores arguments that it takes only as `**kwargs`.
        if inspect.signature(video_processor.sample_frames).parameters.keys() >= asked.keys():
            for arguments in ({**own, **_limit(metadata, asked)}, {"num_frames": num_frames}):
                indices = _ask(video_processor, metadata, arguments)
                if indices is not None:
                    return indices
        return [n * metadata["total_num_frames"] // num_frames for n in range(num_frames)]

    return choose_frames


def _limit(metadata: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested `fps` or `num_frames`, limited to the clip's own value.

    Not all processors limit these themselves.
    """
    most = {"fps": metadata["fps"], "num_frames": metadata["total_num_frames"]}
    return {name: min(value, most[name]) for name, value in asked.items()}


def _ask(
    video_processor: Any, metadata: Mapping[str, Any], arguments: Mapping[str, Any]
) -> list[int] | None:
    """Return the frames that `sample_frames` picks, or `None` if it fails or picks wrong ones."""
    from transformers.video_utils import VideoMetadata

    try:
        chosen = video_processor.sample_frames(VideoMetadata(**metadata), **arguments)
    except (ValueError, TypeError, ZeroDivisionError):  # too few frames, or a setting is missing
        return None
    indices: list[int] = np.asarray(chosen).tolist()
    is_within = bool(indices) and indices[0] >= 0 and indices[-1] < metadata["total_num_frames"]
    return indices if is_within and indices == sorted(indices) else None


def _count_frames(
    metadata: Mapping[str, Any], *, fps: float | None = None, num_frames: int | None = None
) -> int:
    total: int = metadata["total_num_frames"]
    if num_frames is not None:
        return min(num_frames, total)
    if fps is None:
        return min(_DEFAULT_NUM_FRAMES, total)
    return max(1, int(min(metadata["duration"] * fps, total)))


_KIND = "a video"
_UNKNOWN_FPS = 24.0  # what Transformers assumes
Frames = npt.NDArray[np.uint8]  # [frames, height, width, 3]
Metadata = dict[str, Any]  # the fields of Transformers' `VideoMetadata`
# Returns indices in rising order, each below `total_num_frames`; an index may be repeated.
ChooseFrames = Callable[[Mapping[str, Any]], Sequence[int]]


def make_metadata(num_frames: int, fps: float, width: int, height: int) -> Metadata:
    """Return a clip's metadata before frames are picked, for Transformers' `VideoMetadata`."""
    return {
        "total_num_frames": num_frames,
        "fps": fps,
        "width": width,
        "height": height,
        "duration": num_frames / fps,
        "video_backend": "pyav",
        "frames_indices": None,
    }


def decode_video(
    data: bytes,
    *,
    choose_frames: ChooseFrames,
    limits: MediaLimits,
    budget: WorkBudget | None = None,
) -> tuple[Frames, Metadata]:
    """Return the kept frames of the first video track of a file, and their metadata.

    `choose_frames` gets the clip's metadata before anything is decoded. Raise `RequestError` if the
    file is damaged or exceeds `limits`. Raise `CostlyItemError` if decoding is more work than
    `budget` allows.
    """
    budget = budget or WorkBudget()
    metadata = _read_metadata(data, limits, budget)
    for _ in range(2):
        indices = _check_indices(choose_frames(dict(metadata)), metadata, limits)
        _check_work(indices[-1] + 1, metadata, limits, budget)
        frames, num_decoded = _read_frames(data, indices, limits, budget)
        if frames is not None:
            height, width = frames.shape[1:3]
            return frames, {**metadata, "width": width, "height": height, "frames_indices": indices}
        if not num_decoded:
            break
        metadata = make_metadata(
            num_decoded, metadata["fps"], metadata["width"], metadata["height"]
        )
    raise RequestError("no frame of this video can be decoded: the file may be damaged")


def _read_metadata(data: bytes, limits: MediaLimits, budget: WorkBudget) -> Metadata:
    with open_container(data, _KIND, max_pixels=limits.max_pixels) as container:
        stream = _get_stream(container, limits)
        if not (stream.width and stream.height):
            raise RequestError(
                "the frames of this video can't be decoded: they are damaged, or have more than "
                f"{limits.max_pixels} pixels, which is the limit"
            )
        check_num_pixels(stream.width, stream.height, limits)
        check_duration(container, stream, limits.max_duration_s)
        num_frames = 0
        for packet in container.demux(stream):
            num_frames += packet.size > 0 and not packet.is_discard
            budget.check_time()
        if not num_frames:
            raise RequestError("this video has no frames")
        rate = stream.average_rate or stream.guessed_rate
        fps = float(rate) if rate and rate > 0 else _UNKNOWN_FPS
        width, height = stream.width, stream.height
    refuse_if_longer(num_frames / fps, limits.max_duration_s)
    return make_metadata(num_frames, fps, width, height)


def _get_stream(container: InputContainer, limits: MediaLimits) -> VideoStream:
    stream = get_first_stream(container.streams.video, "this file has no video track")
    stream.codec_context.options = get_decoder_options(limits.max_pixels)
    return stream


def _check_indices(chosen: Sequence[int], metadata: Metadata, limits: MediaLimits) -> list[int]:
    indices = [int(index) for index in chosen]
    total = metadata["total_num_frames"]
    if not indices or indices != sorted(indices) or indices[0] < 0 or indices[-1] >= total:
        raise InvariantError(
            f"the frames chosen of {total} must exist and be in rising order, not {indices[:8]}"
        )
    check_num_frames(len(indices), metadata["width"], metadata["height"], limits)
    return indices


def check_num_frames(num_frames: int, width: int, height: int, limits: MediaLimits) -> None:
    """Raise `RequestError` if the kept frames are too many, or have too many pixels together."""
    if num_frames > limits.max_frames:
        raise RequestError(
            f"{num_frames} frames of this video would be used, but {limits.max_frames} is the limit"
        )
    if num_frames * width * height > limits.max_video_pixels:
        raise RequestError(
            f"{num_frames} frames of {width} x {height} pixels have more than "
            f"{limits.max_video_pixels} pixels in all, which is the limit"
        )


def _check_work(
    num_frames: int, metadata: Metadata, limits: MediaLimits, budget: WorkBudget
) -> None:
    """Raise an error if decoding the first `num_frames` frames exceeds the limits or the budget."""
    width, height = metadata["width"], metadata["height"]
    if num_frames * width * height > limits.max_decoded_pixels:
        raise RequestError(
            f"{num_frames} frames of {width} x {height} would have to be decoded, which have "
            f"{num_frames * width * height} pixels in all, but {limits.max_decoded_pixels} is the "
            "limit"
        )
    budget.expect(estimate_frames_s(num_frames, width, height))


def _read_frames(
    data: bytes, indices: list[int], limits: MediaLimits, budget: WorkBudget
) -> tuple[Frames | None, int]:
    """Decode a video up to the last of `indices`; return these frames and the number decoded.

    The frames are `None` if the clip ends before the last index; then the number is that of all
    its frames.
    """
    kept: Frames | None = None
    num_kept = num_decoded = num_pixels = 0
    with open_container(data, _KIND, max_pixels=limits.max_pixels) as container:
        for frame in container.decode(_get_stream(container, limits)):
            check_num_pixels(frame.width, frame.height, limits)
            # A frame may be larger than the container claims.
            num_pixels += frame.width * frame.height
            if num_pixels > limits.max_decoded_pixels:
                raise RequestError(
                    f"the frames of this video have more than {limits.max_decoded_pixels} pixels "
                    "in all, which is the limit"
                )
            budget.spend(estimate_frames_s(1, frame.width, frame.height))
            if num_decoded == indices[num_kept]:
                pixels = _to_pixels(frame, kept)
                if kept is None:
                    check_num_frames(len(indices), pixels.shape[1], pixels.shape[0], limits)
                    kept = np.empty((len(indices), *pixels.shape), dtype=np.uint8)
                while num_kept < len(indices) and indices[num_kept] == num_decoded:
                    kept[num_kept] = pixels
                    num_kept += 1
            num_decoded += 1
            if num_kept == len(indices):
                return kept, num_decoded
    return None, num_decoded


def _to_pixels(frame: VideoFrame, kept: Frames | None) -> Frames:
    """Return the RGB pixels of a frame, turned upright and scaled to the size of earlier frames."""
    # A matrix without an angle gives an integer beyond all angles, which one depends on the CPU.
    num_turns = round(frame.rotation / 90) if abs(frame.rotation) <= 180 else 0
    size: dict[str, int] = {}
    if kept is not None:
        height, width = kept.shape[1:3] if num_turns % 2 == 0 else kept.shape[2:0:-1]
        size = {"width": width, "height": height}
    pixels = frame.reformat(format="rgb24", threads=1, **size).to_ndarray()
    return np.rot90(pixels, num_turns)
