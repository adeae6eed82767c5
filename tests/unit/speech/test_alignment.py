from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from sensorium.speech.alignment import filter_median, find_path, find_token_times


def find_cheapest(cost: npt.NDArray[np.float64]) -> float:
    """Return the cost of the cheapest path, by the plain recurrence."""
    sums = np.full((cost.shape[0] + 1, cost.shape[1] + 1), np.inf)
    sums[0, 0] = 0
    for row in range(1, len(sums)):
        for column in range(1, sums.shape[1]):
            before = (sums[row - 1, column - 1], sums[row - 1, column], sums[row, column - 1])
            sums[row, column] = cost[row - 1, column - 1] + min(before)
    return float(sums[-1, -1])


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_path_is_the_cheapest_one_and_goes_step_by_step(
    num_rows: int, num_columns: int, seed: int
) -> None:
    cost = np.random.default_rng(seed).normal(size=(num_rows, num_columns))
    rows, columns = find_path(cost)
    assert (rows[0], columns[0]) == (0, 0)
    assert (rows[-1], columns[-1]) == (num_rows - 1, num_columns - 1)
    steps = set(zip(np.diff(rows).tolist(), np.diff(columns).tolist(), strict=True))
    assert steps <= {(0, 1), (1, 0), (1, 1)}
    assert cost[rows, columns].sum() == pytest.approx(find_cheapest(cost), abs=1e-4)


@pytest.mark.parametrize("seed", range(10))
def test_path_is_that_of_transformers(seed: int) -> None:
    random = np.random.default_rng(seed)
    cost = random.normal(size=(random.integers(1, 40), random.integers(1, 60)))
    if seed % 2:
        cost = cost.round()  # many ways are equal
    expected = _dynamic_time_warping(cost)
    for ours, theirs in zip(find_path(cost), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("length", [1, 3, 4, 50])
def test_median_is_that_of_transformers(width: int, length: int) -> None:
    values = np.random.default_rng(0).normal(size=(5, length)).astype(np.float32)
    expected = _median_filter(torch.from_numpy(values)[None], width)[0]
    np.testing.assert_array_equal(filter_median(values, width), expected.numpy())


def test_tokens_have_the_times_of_their_attention() -> None:
    attention = np.full((2, 4, 100), 0.001, np.float32)
    for token, begin in enumerate((0, 20, 45, 70)):
        attention[:, token, begin : begin + 20] = 1
    times = find_token_times(attention, num_positions=100, median_filter_width=7)
    np.testing.assert_allclose(times, [0, 0.4, 0.9, 1.4], atol=0.1)


def test_padding_has_no_part_in_times() -> None:
    attention = np.random.default_rng(1).random((3, 6, 90), np.float32)
    changed = attention.copy()
    changed[:, :, 50:] = 7
    arguments = {"num_positions": 50, "median_filter_width": 7}
    times = find_token_times(attention, **arguments)
    np.testing.assert_array_equal(find_token_times(changed, **arguments), times)
    assert times.max() < 50 * 0.02


@pytest.mark.parametrize("shape", [(2, 1, 30), (2, 3, 0), (2, 3, 1), (1, 3, 2)])
def test_small_windows_and_equal_attention_have_times(shape: tuple[int, int, int]) -> None:
    times = find_token_times(np.ones(shape, np.float32), num_positions=30, median_filter_width=7)
    assert times.shape == (shape[1],)
    assert np.isfinite(times).all()


def test_the_longest_window_is_not_aligned_cell_by_cell() -> None:
    cost = np.random.default_rng(2).normal(size=(448, 1500))
    num_lines = 0

    def count(_frame: FrameType, event: str, _value: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        find_path(cost)
    finally:
        sys.settrace(before)
    assert num_lines < cost.size / 10  # far fewer than there are cells
