"""Which frames of a clip a model sees: its processor's own rule, asked before anything is decoded.

Processors that sample nothing by themselves would take every frame of a clip: they get a bounded
number, spread by that same rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sensorium.multimodal.decoding.video import ChooseFrames

_DEFAULT_NUM_FRAMES = 32


def make_frame_chooser(video_processor: Any, options: Mapping[str, object]) -> ChooseFrames:
    """`options` may hold the `fps` or the `num_frames` that the request asks for.

    The rule is asked as the processor itself would ask it, with its own settings beside those of
    the request. Where it fails (for a clip of fewer frames than it wants, or if it can't have both
    a rate and a number) it is asked for a number of frames that there are, and if that fails too,
    the frames are spread evenly.
    """
    asked: dict[str, Any] = {
        name: options[name] for name in ("fps", "num_frames") if options.get(name) is not None
    }
    own = {"fps": video_processor.fps, "num_frames": video_processor.num_frames}
    if not asked and not (video_processor.do_sample_frames or any(own.values())):
        asked = {"num_frames": _DEFAULT_NUM_FRAMES}

    def choose_frames(metadata: Mapping[str, Any]) -> Sequence[int]:
        num_frames = _count_frames(metadata, **(asked or own))
        if _takes(video_processor.sample_frames, asked):
            for arguments in ({**own, **_limit(metadata, asked)}, {"num_frames": num_frames}):
                indices = _ask(video_processor, metadata, arguments)
                if indices is not None:
                    return indices
        return _spread(metadata["total_num_frames"], num_frames)

    return choose_frames


def _takes(sample_frames: Callable[..., object], asked: Mapping[str, object]) -> bool:
    """Arguments without a name are taken by all rules, and not heeded."""
    return inspect.signature(sample_frames).parameters.keys() >= asked.keys()


def _limit(metadata: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """To what the clip has: some rules would list as many frames as they are asked for."""
    most = {"fps": metadata["fps"], "num_frames": metadata["total_num_frames"]}
    return {name: min(value, most[name]) for name, value in asked.items()}


def _ask(
    video_processor: Any, metadata: Mapping[str, Any], arguments: Mapping[str, Any]
) -> list[int] | None:
    """`None` if the rule can't do it."""
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


def _spread(total_num_frames: int, num_frames: int) -> list[int]:
    return [index * total_num_frames // num_frames for index in range(num_frames)]
