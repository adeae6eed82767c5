"""Which batch sizes have a graph, and which of them a step takes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sensorium.worker.graphs.building import get_decode_sizes, get_token_sizes
from sensorium.worker.graphs.recorder import find_size


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (27, (1, 2, 4, 8, 16, 24, 27)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_sizes_end_with_the_most_requests_of_a_step(
    max_num_seqs: int, sizes: tuple[int, ...]
) -> None:
    assert get_decode_sizes(max_num_seqs) == sizes


@pytest.mark.parametrize(
    ("chosen", "sizes"), [((2, 1), (1, 2)), ((4, 8, 9), (4, 6)), ((100,), (6,)), ((3, 3), (3,))]
)
def test_chosen_sizes_also_end_with_the_most_requests(
    chosen: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    assert get_decode_sizes(6, chosen) == sizes


@pytest.mark.parametrize("budget", [1, 16, 100, 512, 2048, 8192, 10_000])
def test_token_sizes_end_with_the_budget_and_pad_little(budget: int) -> None:
    sizes = get_token_sizes(budget)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == budget
    for below, size in pairwise(sizes):
        assert size <= max(below + 32, 1.5 * below)
    assert len(sizes) < 40


def test_a_step_takes_the_smallest_size_that_is_large_enough() -> None:
    sizes = (1, 2, 4, 8)
    assert [find_size(sizes, number) for number in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, None]
