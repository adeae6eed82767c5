"""Says whether two computations of the same thing agree but for rounding."""

from __future__ import annotations

import torch

_NUM_ROUNDINGS = 8


def get_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, as a share of the size of what is expected."""
    scale = expected.float().square().mean().sqrt().clamp(min=1e-6)
    return float((found.float() - expected.float()).abs().max() / scale)


def is_rounding(distance: float, dtype: torch.dtype) -> bool:
    """Return whether a distance can come from rounding to this type. NaN can't."""
    return distance <= _NUM_ROUNDINGS * torch.finfo(dtype).eps
