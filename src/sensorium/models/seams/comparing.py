"""Compares two computations of the same thing: do they agree but for rounding?"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

_NUM_ROUNDINGS = 8
_NUM_ROWS = 8
# Of all layers of a model. What is wrong in one place is at 1 or more in the end.
_MANY_ROUNDINGS = 4096
_MOST = 0.5


def make_rows(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Return random rows to compare with, of a weight's type and on its device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_NUM_ROWS, width, generator=generator).to(weight)


def get_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, as a share of the size of what is expected."""
    scale = expected.float().square().mean().sqrt().clamp(min=1e-6)
    return float((found.float() - expected.float()).abs().max() / scale)


def is_rounding(distance: float, dtype: torch.dtype) -> bool:
    """Return whether a distance can come from rounding to this type. NaN can't."""
    return distance <= _NUM_ROUNDINGS * torch.finfo(dtype).eps


def is_many_roundings(distance: float, dtype: torch.dtype) -> bool:
    """Return whether a distance can come from roundings in all layers of a model."""
    return distance <= min(_MOST, _MANY_ROUNDINGS * torch.finfo(dtype).eps)


class CausalAttention:
    """An `AttentionCall` in which the tokens of a pass attend to each other, without a cache."""

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        del layer_index, window
        output = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2)
