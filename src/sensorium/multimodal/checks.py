"""What may be given as a media item in process: PIL images, arrays and tensors.

Paths and addresses are not followed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from PIL import Image

from sensorium.types.errors import RequestError

_NUM_DIMENSIONS = {"image": (2, 3), "video": (4,), "audio": (1,)}
# What Transformers' `VideoMetadata` has, and what a caller may say of frames.
_VIDEO_FIELDS = frozenset(
    {"total_num_frames", "fps", "width", "height", "duration", "video_backend", "frames_indices"}
)
Metadata = dict[str, object]


def check_media(
    modality: str, media: object, *, sampling_rate: int | None, is_scaled_already: bool
) -> tuple[object, Metadata | None]:
    """The item in a form that processors understand, and what is known of a video's frames."""
    if modality == "audio":
        return _check_audio(media, sampling_rate), None
    metadata = None
    if modality == "video":
        media, metadata = _split_metadata(media)
    checked = _check_visual(modality, media)
    if not is_scaled_already:
        _check_pixels(checked)
    if metadata is not None:
        num_frames = len(checked)  # type: ignore[arg-type]
        metadata = _complete_metadata(metadata, num_frames)
    return checked, metadata


def _split_metadata(media: object) -> tuple[object, Mapping[str, object] | None]:
    """Frames, or a pair of frames and a mapping."""
    is_pair = isinstance(media, tuple) and len(media) == 2 and isinstance(media[1], Mapping)
    return media if is_pair else (media, None)  # type: ignore[return-value]


def _complete_metadata(metadata: Mapping[str, object], num_frames: int) -> Metadata:
    unknown = sorted(map(str, set(metadata) - _VIDEO_FIELDS))
    if unknown:
        known = ", ".join(sorted(_VIDEO_FIELDS))
        raise RequestError(f"unknown video metadata: {', '.join(unknown)} (known: {known})")
    fps = metadata.get("fps")
    if fps is not None and not (_is_number(fps) and float(fps) > 0):  # type: ignore[arg-type]
        raise RequestError(f"video metadata: fps must be a number above 0, not {fps!r}")
    given = metadata.get("frames_indices")
    indices = list(range(num_frames)) if given is None else _as_list(given)
    if len(indices) != num_frames:
        raise RequestError(f"{len(indices)} frames_indices for {num_frames} frames")
    return {"total_num_frames": num_frames, **metadata, "frames_indices": indices}


def _as_list(indices: Any) -> list[int]:
    values = indices.tolist() if isinstance(indices, np.ndarray | torch.Tensor) else indices
    is_valid = isinstance(values, list | tuple) and all(type(v) is int and v >= 0 for v in values)
    if not is_valid:
        raise RequestError("video metadata: frames_indices must be a list of integers >= 0")
    return list(values)


def _is_number(value: object) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and bool(np.isfinite(float(value)))  # type: ignore[arg-type]


def _check_audio(media: object, sampling_rate: int | None) -> np.ndarray[Any, Any]:
    """Mono samples as float32, from samples or a pair of samples and their rate."""
    if isinstance(media, tuple) and len(media) == 2:
        media, rate = media
        if rate != sampling_rate:
            raise RequestError(f"this model hears {sampling_rate} samples a second, not {rate}")
    if isinstance(media, torch.Tensor):
        media = media.detach().cpu().numpy()
    if not isinstance(media, np.ndarray):
        raise RequestError(f"expected an array of samples, not {type(media).__name__}")
    if media.ndim == 2:
        raise RequestError(f"sounds are mono, one number a sample, not of shape {media.shape}")
    _check_shape("audio", media)
    samples = np.ascontiguousarray(media)
    if samples.dtype.kind == "i":
        samples = samples / -float(np.iinfo(samples.dtype).min)
    elif samples.dtype.kind != "f":
        raise RequestError(
            f"samples are numbers from -1 to 1, or signed integers, not {media.dtype}"
        )
    samples = samples.astype(np.float32)
    if not np.isfinite(samples).all():
        raise RequestError("some samples are not finite numbers")
    return samples


def _check_visual(modality: str, media: object) -> object:
    if isinstance(media, Image.Image) and modality == "image":
        return media if media.mode == "RGB" else _as_rgb(media)
    if modality == "video" and isinstance(media, list | tuple) and media:
        frames = [np.asarray(_check_visual("image", frame)) for frame in media]
        sizes = sorted({frame.shape for frame in frames})
        if len(sizes) > 1:
            raise RequestError(f"frames of different sizes: {', '.join(map(str, sizes))}")
        media = np.stack(frames)
    if not isinstance(media, np.ndarray | torch.Tensor):
        kinds = (
            "a PIL image, a numpy array or a torch tensor" if modality == "image" else "an array"
        )
        raise RequestError(f"expected {kinds}, not {type(media).__name__}")
    _check_shape(modality, media)
    if isinstance(media, np.ndarray):
        # Flipped views and foreign byte orders have no tensor form.
        media = np.ascontiguousarray(media, dtype=media.dtype.newbyteorder("="))
    if modality == "image" and media.ndim == 2:
        if isinstance(media, np.ndarray):
            return np.stack([media] * 3, axis=-1)
        return torch.stack([media] * 3)
    return media


def _as_rgb(image: Image.Image) -> Image.Image:
    """What is transparent becomes white, as in Transformers' processors."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    colours = image.convert("RGBA")
    white = Image.new("RGBA", colours.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, colours).convert("RGB")


def _check_shape(modality: str, media: Any) -> None:
    if media.ndim not in _NUM_DIMENSIONS[modality] or 0 in media.shape:
        counts = " or ".join(map(str, _NUM_DIMENSIONS[modality]))
        raise RequestError(
            f"expected {counts} non-empty dimensions, not shape {tuple(media.shape)}"
        )


def _check_pixels(media: object) -> None:
    """Processors divide by 255: values from 0 to 1 would be seen as black, without a word."""
    if not isinstance(media, np.ndarray | torch.Tensor):
        return
    kind = str(media.dtype)
    is_scaled = "float" in kind and 0 < float(media.max()) <= 1
    if "bool" in kind or is_scaled:
        raise RequestError(
            f"pixel values go from 0 to 255, not from 0 to 1 ({kind}); for values that are scaled "
            "already say mm_processor_kwargs={'do_rescale': False}"
        )
