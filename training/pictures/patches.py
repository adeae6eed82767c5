"""What a vision tower is fed with: pictures changed a little, normalised and cut into patches.

The patches are those of Transformers' Qwen2-VL processors for media that need no resizing.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch.nn import functional

PATCH_SIZE = 14
MERGE_SIZE = 2
TEMPORAL_PATCH_SIZE = 2
MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's
STD = (0.26862954, 0.26130258, 0.27577711)


def normalize_and_patch(images: torch.Tensor) -> torch.Tensor:
    """[B, 3, H, W] from 0 to 1 -> [B, patches, 1176]; both frames of a patch are the same."""
    return normalize_and_patch_video(images[:, None].expand(-1, TEMPORAL_PATCH_SIZE, -1, -1, -1))


def normalize_and_patch_video(frames: torch.Tensor) -> torch.Tensor:
    """[B, T, 3, H, W] from 0 to 1, T even -> [B, patches, 1176], in the order of time first."""
    batch, num_frames, channels, height, width = frames.shape
    mean, std = _mean_and_std(frames.device, frames.dtype)
    frames = (frames - mean) / std
    merged = MERGE_SIZE * PATCH_SIZE
    patches = frames.reshape(
        batch,
        num_frames // TEMPORAL_PATCH_SIZE,
        TEMPORAL_PATCH_SIZE,
        channels,
        height // merged,
        MERGE_SIZE,
        PATCH_SIZE,
        width // merged,
        MERGE_SIZE,
        PATCH_SIZE,
    )
    # batch | time, merged row, merged column, row in it, column in it | channel, frame, y, x
    patches = patches.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    return patches.flatten(6).flatten(1, 5)


@cache
def _mean_and_std(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation on the device, sent once because sending waits for its work."""
    mean, std = torch.tensor([MEAN, STD], device=device, dtype=dtype)[:, :, None, None]
    return mean, std


def augment(
    images: torch.Tensor, generator: torch.Generator, *, jpeg_share: float = 0.25
) -> torch.Tensor:
    """Each picture [B, 3, H, W] with its own mild change of light, sharpness and noise.

    `generator` is of the pictures' device. `jpeg_share` of them look as if read from JPEG.
    """

    def uniform(low: float, high: float, channels: int = 1) -> torch.Tensor:
        shape = (len(images), channels, 1, 1)
        values = torch.rand(shape, generator=generator, device=images.device, dtype=images.dtype)
        return low + (high - low) * values

    blurred = functional.avg_pool2d(
        functional.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1
    )
    # Below 0 it is sharpened, above it is blurred; most pictures stay as they are.
    sharpness = uniform(-1.5, 1.5)
    sharpness = sharpness.sign() * (sharpness.abs() - 0.7).clamp(min=0)
    images = torch.lerp(images, blurred, sharpness.clamp(-0.5, 0.8))
    contrast, brightness = uniform(0.8, 1.15), uniform(-0.08, 0.08)
    tint, shift = uniform(0.95, 1.05, 3), uniform(-0.02, 0.02, 3)
    images = (images - 0.5) * (contrast * tint) + (0.5 + brightness + shift)
    if jpeg_share:
        order = torch.randperm(len(images), generator=generator, device=images.device)
        rows = order[: round(jpeg_share * len(images))]
        images[rows] = _as_jpeg(images[rows], uniform(0.02, 0.10)[rows])
    noise = torch.randn(images.shape, generator=generator, device=images.device, dtype=images.dtype)
    deviation = uniform(-0.03, 0.04).clamp(min=0)
    return images.addcmul(noise, deviation).clamp_(0, 1)


def _as_jpeg(images: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Frequencies of 8x8 blocks rounded to multiples of a step, larger for the higher ones."""
    height, width = images.shape[2:]
    padded = functional.pad(images, (0, -width % 8, 0, -height % 8), mode="replicate")
    n = torch.arange(8, device=images.device, dtype=images.dtype)
    basis = torch.cos(math.pi / 8 * (n + 0.5) * n[:, None]) / 2
    basis[0] /= math.sqrt(2)
    blocks = padded.reshape(*images.shape[:2], padded.shape[2] // 8, 8, padded.shape[3] // 8, 8)
    blocks = blocks.transpose(3, 4)
    steps = steps[:, :, :, :, None, None] * (1 + 0.5 * (n[:, None] + n))
    # Times the basis from the right only, which is one large product; transposed in between.
    frequencies = (blocks @ basis.T).transpose(4, 5) @ basis.T
    rounded = (frequencies / steps).round() * steps
    whole: torch.Tensor = (rounded @ basis).transpose(4, 5) @ basis
    whole = whole.transpose(3, 4).reshape(padded.shape)
    return whole[:, :, :height, :width]
