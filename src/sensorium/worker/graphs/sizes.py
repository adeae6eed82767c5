"""Chooses the numbers of requests and of tokens that CUDA graphs are captured for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_SMALL = (1, 2, 4, 8)
_STEP = 8


def get_decode_sizes(max_num_seqs: int, chosen: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return 1, 2, 4, 8 and then the multiples of 8, up to the most requests of a step.

    Sizes that the user has chosen are used instead. One that is larger than `max_num_seqs` is
    reduced to it.
    """
    sizes = chosen or (*_SMALL, *range(_STEP, max_num_seqs, _STEP), max_num_seqs)
    if chosen is None:
        return tuple(sorted({size for size in sizes if size <= max_num_seqs}))
    return tuple(sorted({min(size, max_num_seqs) for size in sizes}))


def get_token_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Return numbers of tokens up to the most of a step.

    Padding adds less than a quarter to a step of more than 256 tokens.
    """
    sizes = {16, 32, 64, 96}
    for first, last, step in ((128, 512, 64), (512, 2048, 128), (2048, max_num_tokens, 512)):
        sizes.update(range(first, last + 1, step))
    return tuple(sorted({size for size in sizes if size < max_num_tokens} | {max_num_tokens}))


def find_size(sizes: Sequence[int], number: int) -> int | None:
    """Return the smallest of the ascending sizes that is at least `number`, if there is one."""
    index = bisect_left(sizes, number)
    return sizes[index] if index < len(sizes) else None
