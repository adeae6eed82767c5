"""Decides whether two computations of the same numbers differ only by rounding.

The distance of two tensors is the largest relative difference between their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

_NUM_ROUNDINGS = 8
_NUM_ROWS = 8
# The roundings of all layers of a model together.
_MANY_ROUNDINGS = 4096
# An error in one place grows to a distance of 1 or more at the end of the model.
_MOST = 0.5


def make_rows(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Return random rows [8, width] as test input, in the dtype of a weight and on its device.

    The rows have very different magnitudes, so that the limits of activations are reached. So have
    the columns, which grow along a row: a computation of only a part of a row then differs.
    """
    generator = torch.Generator().manual_seed(0)
    columns = torch.logspace(-1, 1, width) * 10 ** (torch.rand(width, generator=generator) - 0.5)
    sizes = torch.logspace(-1, 2.5, _NUM_ROWS)[:, None]
    return (torch.randn(_NUM_ROWS, width, generator=generator) * columns * sizes).to(weight)


def get_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative difference of two tensors, or NaN if they can't be compared.

    A difference is divided by the expected number, or by the root mean square of its row if that is
    larger. Rows that are not finite in `expected` are ignored. The tensors can't be compared if
    their shapes differ, or if less than half of the rows are finite.
    """
    distances = _get_distances(found, expected)
    return float(distances.max()) if distances.numel() else float("nan")


def find_closest(candidates: Sequence[torch.Tensor], expected: torch.Tensor) -> int | None:
    """Return the index of the candidate that is closest to `expected` on average.

    Return None if even that one differs by more than rounding, or if one can't be compared.
    """
    distances = [_get_distances(candidate, expected) for candidate in candidates]
    if any(part.numel() == 0 for part in distances):
        return None
    index = min(range(len(distances)), key=lambda i: _get_mean(distances[i]))
    is_same = is_rounding(float(distances[index].max()), expected.dtype)
    return index if is_same else None


def _get_mean(distances: torch.Tensor) -> float:
    mean = float(distances.mean())
    return mean if math.isfinite(mean) else math.inf


def _get_distances(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return each number's relative difference, or an empty tensor if they can't be compared."""
    if found.shape != expected.shape:
        return expected.new_empty(0)
    found, expected = found.float().flatten(0, -2), expected.float().flatten(0, -2)
    is_finite = expected.isfinite().all(-1)
    if 2 * int(is_finite.sum()) < len(is_finite):
        return expected.new_empty(0)
    found, expected = found[is_finite], expected[is_finite]
    size = expected.square().mean(-1, keepdim=True).sqrt()
    return (found - expected).abs() / torch.maximum(expected.abs(), size).clamp(min=1e-12)


def is_rounding(distance: float, dtype: torch.dtype) -> bool:
    """Return whether a difference can come from a few roundings to a dtype; False for NaN."""
    return distance <= _NUM_ROUNDINGS * torch.finfo(dtype).eps


def is_many_roundings(distance: float, dtype: torch.dtype) -> bool:
    """Return whether a difference can come from the roundings of all layers; False for NaN."""
    return distance <= min(_MOST, _MANY_ROUNDINGS * torch.finfo(dtype).eps)


class CausalAttention:
    """An `AttentionCall` in which the tokens of a pass attend to each other, without a KV cache."""

    def attend(
        self,
        _layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
    ) -> torch.Tensor:
        output = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2)
