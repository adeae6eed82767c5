"""Decodes media files to pixels or samples, with options that are part of an item's hash.

Owns the names and defaults of the options. A change of the code that changes decoded pixels or
samples must raise `_VERSION`, so that older results are no longer found in caches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from sensorium.multimodal.decoding.audio import decode_audio
from sensorium.multimodal.decoding.guards import WorkBudget
from sensorium.multimodal.decoding.images import WHITE, Colour, decode_image
from sensorium.multimodal.decoding.video import ChooseFrames, decode_video
from sensorium.multimodal.media import MediaLimits
from sensorium.types.errors import InvariantError, RequestError, at

_VERSION = 1
_SAMPLING = ("fps", "num_frames")
# Names of options that clients send -> the names here.
_ALIASES = {"rgba_background_color": "background"}
DecodeOptions = dict[str, Any]


def resolve_decode_options(
    modality: str, media_io_kwargs: Mapping[str, object] | None
) -> DecodeOptions:
    """Return all decoder options for one modality: those of the request, completed by defaults.

    `media_io_kwargs` has the options of the request by modality, as in `{"video": {"fps": 2.0}}`.
    Raise `RequestError` for an unknown option or a wrong value.
    """
    given = media_io_kwargs if media_io_kwargs is not None else {}
    if not isinstance(given, Mapping) or not given.keys() <= _CHECKS.keys():
        known = ", ".join(_CHECKS)
        raise RequestError(
            f"must map modalities ({known}) to options, not {given!r:.100}",
            path=("media_io_kwargs",),
        )
    options = given.get(modality)
    with at("media_io_kwargs", modality):
        if not isinstance(options, Mapping | None):
            raise RequestError(f"must map names of options to values, not {options!r:.100}")
        checks = _CHECKS[modality]
        resolved: DecodeOptions = {"version": _VERSION, **dict.fromkeys(checks)}
        for name, value in (options or {}).items():
            canonical = _ALIASES.get(name, name)
            if canonical not in checks:
                known = ", ".join(checks) or "none"
                raise RequestError(f"unknown option {name} (known: {known})")
            if value is not None:
                with at(str(name)):
                    resolved[canonical] = checks[canonical](value)
        return _complete(modality, resolved)


def resolve_options(
    modality: str, processor_kwargs: Mapping[str, Any], media_io_kwargs: Mapping[str, object] | None
) -> tuple[dict[str, Any], DecodeOptions]:
    """Return all options of the model's processor and of the decoder, for an encoded media item.

    The decoder samples the frames of a video, so the processor's `fps` and `num_frames` become
    options of the decoder, unless `media_io_kwargs` already has one of these two.
    """
    decode_options = resolve_decode_options(modality, media_io_kwargs)
    if modality == "video":
        return _move_sampling(processor_kwargs, decode_options), decode_options
    return dict(processor_kwargs), decode_options


def _move_sampling(processor_kwargs: Mapping[str, Any], options: DecodeOptions) -> dict[str, Any]:
    """Return a video's processor options, without `fps` and `num_frames`: `options` gets them."""
    kwargs = dict(processor_kwargs)
    kwargs.pop("do_sample_frames", None)
    asked = {name: kwargs.pop(name) for name in _SAMPLING if kwargs.get(name) is not None}
    if asked and not any(options[name] for name in _SAMPLING):
        for name, value in asked.items():
            with at("mm_processor_kwargs", name):
                options[name] = _CHECKS["video"][name](value)
        with at("mm_processor_kwargs"):
            _complete("video", options)
    if options["fps"] is not None:
        kwargs["fps"] = options["fps"]  # some processors compute the times of frames from it
    return kwargs


def decode(
    modality: str,
    data: bytes,
    options: Mapping[str, Any],
    *,
    limits: MediaLimits,
    sampling_rate: int | None = None,
    choose_frames: ChooseFrames | None = None,
    budget: WorkBudget | None = None,
) -> tuple[object, dict[str, Any] | None]:
    """Return the decoded media item, and for a video also the metadata of its frames (else None).

    Audio needs `sampling_rate` (in Hz), and a video needs `choose_frames`. Raise `RequestError` if
    the file is damaged or exceeds `limits`. Raise `CostlyItemError` if decoding is more work than
    `budget` allows; without a `budget` it may take any time.
    """
    if len(data) > limits.max_bytes:
        raise RequestError(f"the file has more than {limits.max_bytes} bytes, which is the limit")
    if modality == "image":
        background = cast("Colour", tuple(options["background"]))
        return decode_image(data, limits=limits, background=background, budget=budget), None
    if modality == "audio" and sampling_rate is not None:
        samples = decode_audio(data, sampling_rate=sampling_rate, limits=limits, budget=budget)
        return samples, None
    if modality == "video" and choose_frames is not None:
        return decode_video(data, choose_frames=choose_frames, limits=limits, budget=budget)
    raise InvariantError(f"{modality} can't be decoded without a sampling rate or a frame chooser")


def _complete(modality: str, options: DecodeOptions) -> DecodeOptions:
    if modality == "image" and options["background"] is None:
        options["background"] = list(WHITE)
    if modality == "video" and None not in (options["fps"], options["num_frames"]):
        raise RequestError("either fps or num_frames may be given, but not both")
    return options


def _check_colour(value: object) -> list[int]:
    is_colour = isinstance(value, list | tuple) and len(value) == 3
    if not is_colour or not all(type(part) is int and 0 <= part <= 255 for part in value):  # type: ignore[attr-defined]
        raise RequestError(f"must be three whole numbers from 0 to 255, not {value!r:.100}")
    return list(cast("list[int]", value))


def _check_fps(value: object) -> float:
    is_number = type(value) in (int, float)
    if not is_number or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise RequestError(f"must be a number above 0, not {value!r:.100}")
    return float(cast("float", value))


def _check_num_frames(value: object) -> int:
    if type(value) is not int or value <= 0:
        raise RequestError(f"must be a whole number above 0, not {value!r:.100}")
    return value


_CHECKS: dict[str, dict[str, Callable[[object], object]]] = {
    "image": {"background": _check_colour},
    "audio": {},
    "video": {"fps": _check_fps, "num_frames": _check_num_frames},
}
