"""The batch sizes that CUDA graphs are captured for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_SMALL = (1, 2, 4, 8)
_STEP = 8


def get_decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8 and then every eighth number, up to the most requests of a step."""
    sizes = {*_SMALL, *range(_STEP, max_num_seqs, _STEP), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def find_size(sizes: Sequence[int], number: int) -> int | None:
    """Return the smallest of the ascending sizes that is not below a number."""
    index = bisect_left(sizes, number)
    return sizes[index] if index < len(sizes) else None
