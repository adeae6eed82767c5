"""Finds the embeddings that belong to the tokens of a window of a prompt.

It computes indices only and touches no tensors. The cost is O(log n) in the number of items of the
request, plus the length of the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sensorium.types.multimodal import MultiModalFeatureSpec, get_mm_features_in_window
from sensorium.utils.arrays import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSlice:
    """A run of an item's embeddings, and the prompt tokens that they replace."""

    mm_index: int  # the item's index in the request
    start: int  # the embeddings [start, end) of the item
    end: int
    positions: IntArray  # the index in the prompt of each of these embeddings


def get_gather_slices(
    features: Sequence[MultiModalFeatureSpec], window_start: int, window_end: int
) -> list[GatherSlice]:
    """Return the slices for the prompt positions `[window_start, window_end)`, in order."""
    slices = []
    lo, hi = get_mm_features_in_window(features, window_start, window_end)
    for mm_index in range(lo, hi):
        position = features[mm_index].mm_position
        first = max(0, window_start - position.offset)
        last = min(position.length, window_end - position.offset)
        start, end = position.get_embeds_indices_in_range(first, last)
        if start == end:
            continue
        if position.is_embed is None:
            positions = np.arange(position.offset + first, position.offset + last)
        else:
            mask = np.array(position.is_embed[first:last], dtype=bool)
            positions = np.flatnonzero(mask) + (position.offset + first)
        slices.append(GatherSlice(mm_index=mm_index, start=start, end=end, positions=positions))
    return slices
