"""Which batch sizes have a graph, and which of them a step takes."""

from __future__ import annotations

import pytest

from sensorium.worker.graphs.sizes import find_size, get_decode_sizes


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


def test_a_step_takes_the_smallest_size_that_is_large_enough() -> None:
    sizes = (1, 2, 4, 8)
    assert [find_size(sizes, number) for number in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, None]
