"""Which embeddings of which items stand at which tokens of a window. Index work only, no tensors.

Costs O(log n) in the number of items of the request, plus the window itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sensorium.types.multimodal import MultiModalFeatureSpec, get_mm_features_in_window
from sensorium.utils.arrays import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSlice:
    """The embeddings `[start, end)` of item `mm_index` go to the tokens `positions` of the
    prompt.
    """

    mm_index: int
    start: int
    end: int
    positions: IntArray


def get_gather_slices(
    features: Sequence[MultiModalFeatureSpec], window_start: int, window_end: int
) -> list[GatherSlice]:
    """The slices for the prompt positions `[window_start, window_end)`, in order."""
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
