"""Checks media that are given in process: PIL images, arrays and tensors.

Reads no paths or addresses, and ignores EXIF data: the caller has decided how images are turned.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from PIL import Image

from sensorium.multimodal.decoding.audio import (
    check_rate,
    check_samples,
    mix_down,
    resample,
    scale_samples,
)
from sensorium.multimodal.decoding.guards import refuse_if_longer
from sensorium.multimodal.decoding.images import check_num_pixels, to_rgb
from sensorium.multimodal.decoding.video import check_num_frames
from sensorium.multimodal.media import MediaLimits
from sensorium.types.errors import RequestError

NUM_DIMENSIONS = {"image": (2, 3), "video": (4,), "audio": (1, 2)}
_MAX_CHANNELS = 64  # of audio; a longer dimension can't be that of the channels
# Processors compute with these types. With larger unsigned integers their results are wrong.
_INTEGERS = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64"})
_PIXEL_TYPES = _INTEGERS | {"float16", "bfloat16", "float32", "float64"}
# The fields of Transformers' `VideoMetadata`, which a caller may give for frames.
_VIDEO_FIELDS = frozenset(
    {"total_num_frames", "fps", "width", "height", "duration", "video_backend", "frames_indices"}
)
Metadata = dict[str, object]


def check_media(
    modality: str,
    media: object,
    *,
    sampling_rate: int | None,
    is_scaled_already: bool,
    limits: MediaLimits,
) -> tuple[object, Metadata | None]:
    """Check decoded media from a caller in this process, and convert it for the model's processor.

    Return the media item and, for a video, the metadata of its frames (otherwise `None`). `media`
    may be a pair of the item and its sampling rate (audio) or metadata (video). Audio becomes mono
    float32 at `sampling_rate`, in Hz. `is_scaled_already` is True if the processor does not divide
    pixel values by 255. Raise `RequestError` for media that no processor would understand, or that
    exceeds `limits`.
    """
    if modality == "audio":
        return _check_audio(media, sampling_rate, limits), None
    metadata = None
    if modality == "video":
        media, metadata = _split_metadata(media)
    checked = _check_visual(modality, media, limits)
    _check_pixels(checked, is_scaled_already=is_scaled_already)
    if metadata is not None:
        num_frames = len(checked)  # type: ignore[arg-type]
        metadata = _complete_metadata(metadata, num_frames)
    return checked, metadata


def check_unread(modality: str, media: object, limits: MediaLimits) -> None:
    """Raise `RequestError` for decoded media of a wrong form or size; values are not read."""
    if isinstance(media, tuple) and len(media) == 2:
        media = media[0]  # the second entry is a rate, or the metadata of frames
    if isinstance(media, list | tuple) and modality == "video":
        for frame in media:
            check_unread("image", frame, limits)
    if isinstance(media, Image.Image):
        if 0 in media.size:
            raise RequestError("this image is empty: its width or height is 0")
        check_num_pixels(*media.size, limits)
    if isinstance(media, torch.Tensor):
        _check_plain(media)
    if isinstance(media, np.ndarray | torch.Tensor):
        _check_shape(modality, media)
        if modality != "audio":
            _check_size(modality, media, limits)


def _split_metadata(media: object) -> tuple[object, Mapping[str, object] | None]:
    is_pair = isinstance(media, tuple) and len(media) == 2 and isinstance(media[1], Mapping)
    return media if is_pair else (media, None)  # type: ignore[return-value]


def _complete_metadata(metadata: Mapping[str, object], num_frames: int) -> Metadata:
    unknown = sorted(map(str, set(metadata) - _VIDEO_FIELDS))
    if unknown:
        known = ", ".join(sorted(_VIDEO_FIELDS))
        raise RequestError(f"unknown video metadata: {', '.join(unknown)} (known fields: {known})")
    fps = metadata.get("fps")
    if fps is not None and not (_is_number(fps) and float(fps) > 0):  # type: ignore[arg-type]
        raise RequestError(f"video metadata: fps must be a number above 0, not {fps!r}")
    total = metadata.get("total_num_frames")
    total = num_frames if total is None else total
    if type(total) is not int or total < 1:
        raise RequestError(
            f"video metadata: total_num_frames must be an integer above 0, not {total!r}"
        )
    given = metadata.get("frames_indices")
    indices = list(range(num_frames)) if given is None else _as_list(given)
    if len(indices) != num_frames:
        raise RequestError(
            f"video metadata: there are {len(indices)} frames_indices for {num_frames} frames; "
            "each frame must have one"
        )
    return {**metadata, "total_num_frames": total, "frames_indices": indices}


def _as_list(indices: Any) -> list[int]:
    values = indices.tolist() if isinstance(indices, np.ndarray | torch.Tensor) else indices
    is_valid = isinstance(values, list | tuple) and all(type(v) is int and v >= 0 for v in values)
    if not is_valid:
        raise RequestError("video metadata: frames_indices must be a list of integers >= 0")
    return list(values)


def _is_number(value: object) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and bool(abs(value) <= sys.float_info.max)  # type: ignore[arg-type]


def _check_audio(
    media: object, sampling_rate: int | None, limits: MediaLimits
) -> np.ndarray[Any, Any]:
    """Return audio as mono float32 samples at `sampling_rate`, in Hz.

    `media` is an array of samples, or a pair of an array and its own sampling rate. If the array
    has two dimensions, the smaller one is that of the channels, or the first one if both are equal.
    """
    rate = sampling_rate
    if isinstance(media, tuple) and len(media) == 2:
        media, given_rate = media
        rate = _as_rate(given_rate)
    if isinstance(media, torch.Tensor):
        _check_plain(media)
        kind = str(media.dtype).removeprefix("torch.")
        if kind not in _PIXEL_TYPES:
            raise RequestError(
                f"samples must be floating-point numbers or signed integers, not {kind}"
            )
        if media.dtype is torch.bfloat16:  # which numpy does not have
            media = media.float()
        media = media.detach().cpu().resolve_neg().numpy()
    if not isinstance(media, np.ndarray):
        raise RequestError(f"audio must be an array of samples, not {type(media).__name__}")
    _check_shape("audio", media)
    channels = np.atleast_2d(media)
    channels = channels.T if channels.shape[0] > channels.shape[1] else channels
    if len(channels) > _MAX_CHANNELS:
        raise RequestError(
            f"{media.shape} is no shape of audio: it must be samples, or samples and at most "
            f"{_MAX_CHANNELS} channels"
        )
    if media.dtype.kind not in "if":
        raise RequestError(
            f"samples must be floating-point numbers or signed integers, not {media.dtype}"
        )
    if rate is not None:
        refuse_if_longer(channels.shape[1] / rate, limits.max_duration_s)
    samples = np.ascontiguousarray(mix_down(scale_samples(channels)))
    check_samples(samples)
    if rate is not None and sampling_rate is not None and rate != sampling_rate:
        samples = resample(samples, rate, sampling_rate)
        check_samples(samples)
    return samples


def _as_rate(rate: Any) -> int:
    is_whole = _is_number(rate) and float(rate).is_integer()
    checked = int(rate) if is_whole else rate
    check_rate(checked)
    return int(checked)


def _check_visual(modality: str, media: object, limits: MediaLimits) -> object:
    if isinstance(media, Image.Image) and modality == "image":
        check_num_pixels(*media.size, limits)
        return to_rgb(media)
    if modality == "video" and isinstance(media, list | tuple) and media:
        media = _stack(media, limits)
    if not isinstance(media, np.ndarray | torch.Tensor):
        kinds = (
            "a PIL image, a numpy array or a torch tensor"
            if modality == "image"
            else "an array or a list of frames that is not empty"
        )
        raise RequestError(f"expected {kinds}, not {type(media).__name__}")
    _check_shape(modality, media)
    _check_size(modality, media, limits)
    if isinstance(media, torch.Tensor):
        _check_plain(media)
    else:
        # Views with negative strides and other byte orders can't become tensors.
        media = np.ascontiguousarray(media, dtype=media.dtype.newbyteorder("="))
        if not media.flags.writeable:  # torch warns of arrays that can't be written to
            media = media.copy()
    if modality == "image" and media.ndim == 2:
        if isinstance(media, np.ndarray):
            return np.stack([media] * 3, axis=-1)
        return torch.stack([media] * 3)
    return media


def _stack(images: Sequence[object], limits: MediaLimits) -> np.ndarray[Any, Any]:
    if len(images) > limits.max_frames:
        raise RequestError(
            f"the video has {len(images)} frames, but {limits.max_frames} is the limit"
        )
    frames = [np.asarray(_check_visual("image", image, limits)) for image in images]
    sizes = sorted({frame.shape for frame in frames})
    if len(sizes) > 1:
        raise RequestError(f"the video has frames of different sizes: {', '.join(map(str, sizes))}")
    return np.stack(frames)


def get_array_shape(modality: str, media: np.ndarray[Any, Any] | torch.Tensor) -> tuple[int, ...]:
    """Return the height and width of an image array, or (frames, height, width) of a video."""
    frame = tuple(media.shape[1:] if modality == "video" else media.shape)
    # The colours are the first or the last dimension.
    size = frame[:2] if len(frame) == 2 or frame[2] <= frame[0] else frame[1:]
    return (len(media), *size) if modality == "video" else size


def _check_size(modality: str, media: Any, limits: MediaLimits) -> None:
    *num_frames, height, width = get_array_shape(modality, media)
    check_num_pixels(width, height, limits)
    if num_frames:
        check_num_frames(num_frames[0], width, height, limits)


def _check_plain(media: torch.Tensor) -> None:
    is_strided = media.layout is torch.strided and not media.is_nested
    if not is_strided or media.is_meta or media.is_quantized:
        raise RequestError(
            "expected a plain tensor that holds its values: dense, not nested, not quantized, and "
            "not on the meta device"
        )


def _check_shape(modality: str, media: Any) -> None:
    if media.ndim not in NUM_DIMENSIONS[modality] or 0 in media.shape:
        counts = " or ".join(map(str, NUM_DIMENSIONS[modality]))
        raise RequestError(
            f"expected {counts} non-empty dimensions, not shape {tuple(media.shape)}"
        )


def _check_pixels(media: object, *, is_scaled_already: bool) -> None:
    """Raise `RequestError` if an array's pixel values are in a range that processors misread.

    Processors divide by 255, unless `is_scaled_already`. Values from 0 to 1 would become black, and
    those above 255 white, without an error.
    """
    if not isinstance(media, np.ndarray | torch.Tensor):
        return
    dtype = media.dtype
    kind = dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
    if kind not in _PIXEL_TYPES:
        raise RequestError(f"pixel values must be bytes, or numbers from 0 to 255, not {kind}s")
    if kind == "uint8" or (kind != "bool" and is_scaled_already):
        return
    least, most = float(media.min()), float(media.max())
    if not (np.isfinite(least) and np.isfinite(most)):
        raise RequestError("some pixel values are not finite numbers: they are NaN or infinite")
    is_scaled = "float" in kind and 0 < most <= 1
    if (kind == "bool" or is_scaled) and not is_scaled_already:
        raise RequestError(
            f"pixel values must go from 0 to 255, not from 0 to 1 ({kind}); for values that are "
            "scaled already set mm_processor_kwargs={'do_rescale': False}"
        )
    if not (is_scaled_already or (least >= 0 and most <= 255)):
        raise RequestError(f"pixel values must go from 0 to 255, not from {least:g} to {most:g}")
