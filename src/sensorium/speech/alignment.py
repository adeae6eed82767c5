"""Finds when each token was said, from the attention of a decoder to the positions of the audio.

Attention is normalised and smoothed, averaged over the alignment heads, and then the monotonic path
with the most attention is found. A token's time is where the path enters the token's row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

POSITION_S = 0.02  # seconds per encoder position


def find_token_times(
    attention: npt.NDArray[np.float32], *, num_positions: int, median_filter_width: int
) -> npt.NDArray[np.float64]:
    """Return the time of each token in seconds from the beginning of its window.

    `attention` is [heads, tokens, positions]. Positions from `num_positions` on are padding. The
    row of a token is the step in which the decoder reads it, so its time is where it ends.
    """
    attention = attention[:, :, :num_positions]
    if 0 in attention.shape:
        return np.zeros(attention.shape[1])
    mean = np.zeros(attention.shape[1:], np.float32)
    for head in attention:
        deviation = head.std(axis=0)
        # If all tokens attend alike to a position, it says nothing, and must not divide by zero.
        scale = np.where(deviation > 0, deviation, np.inf)
        mean += filter_median((head - head.mean(axis=0)) / scale, median_filter_width)
    rows, columns = find_path(-mean.astype(np.float64) / len(attention))
    is_first = np.diff(rows, prepend=-1) > 0
    return columns[is_first].astype(np.float64) * POSITION_S


def filter_median(values: npt.NDArray[np.float32], width: int) -> npt.NDArray[np.float32]:
    """Return the running median along the last axis, mirrored at the ends of long enough rows."""
    half = width // 2  # `width` is odd
    length = values.shape[-1]
    if length <= half:
        return values
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(half, half)], mode="reflect")
    columns = [padded[..., start : start + length] for start in range(width)]
    # Each pass moves the greatest value that is left to the end. After `half` + 1 passes the last
    # one moved is the median. Whole arrays are compared, which is faster than sorting each window.
    for last in range(width - 1, half - 1, -1):
        for index in range(last):
            low, high = columns[index], columns[index + 1]
            columns[index] = np.minimum(low, high)
            columns[index + 1] = np.maximum(low, high)
    return columns[half]


def find_path(
    cost: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return rows and columns of the cheapest monotonic path through a matrix of finite costs.

    The path runs from the first to the last cell, right, down or diagonally (dynamic time warping).
    """
    is_diagonal, is_down = _find_steps(cost)
    row, column = cost.shape
    path = []
    # Each step lowers the row or the column, and the first row and column have one way only.
    while row > 0 and column > 0:
        path.append((row - 1, column - 1))
        if is_diagonal[row + column, row]:
            row, column = row - 1, column - 1
        elif is_down[row + column, row]:
            row -= 1
        else:
            column -= 1
    rows, columns = np.array(path[::-1]).T
    return rows, columns


def _find_steps(
    cost: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return whether the best path enters a cell diagonally, and whether from above.

    Both arrays are [row + column, row], counted from 1. Anti-diagonals are computed at once. Sums
    are float32, as in OpenAI's code, so that near ties are decided alike.
    """
    num_rows, num_columns = cost.shape
    num_diagonals = num_rows + num_columns + 1
    is_diagonal, is_down = np.zeros((2, num_diagonals, num_rows + 1), np.bool_)
    costs = _turn(cost)
    # Sums of the last two anti-diagonals and of this one, by row. Row 0 and column 0 stand before
    # the matrix: infinite, except for the corner where all paths begin.
    before, last, current = (np.full(num_rows + 1, np.inf, np.float32) for _ in range(3))
    before[0] = 0
    for number in range(2, num_diagonals):
        first, stop = max(1, number - num_columns), min(num_rows, number - 1) + 1
        diagonal, down = before[first - 1 : stop - 1], last[first - 1 : stop - 1]
        right = last[first:stop]
        comes_diagonally = is_diagonal[number, first:stop]
        comes_down = is_down[number, first:stop]
        # If two ways cost the same, the path takes the one from the left.
        np.less(diagonal, np.minimum(down, right), out=comes_diagonally)
        np.less(down, np.minimum(diagonal, right), out=comes_down)
        sums = current[first:stop]
        np.copyto(sums, right)
        np.copyto(sums, down, where=comes_down)
        np.copyto(sums, diagonal, where=comes_diagonally)
        sums += costs[number - 2, first - 1 : stop - 1]
        before, last, current = last, current, before
        current[0] = np.inf  # the corner belongs to the first anti-diagonal only
    return is_diagonal, is_down


def _turn(cost: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the cells of a matrix as [row + column, row], so that anti-diagonals are rows."""
    num_rows, num_columns = cost.shape
    # Empty cells are put behind each row. If the cells are then read in rows that are one cell
    # shorter, row i is shifted by i cells.
    padded = np.pad(cost, ((0, 0), (0, num_rows)))
    sheared = padded.ravel()[: num_rows * (num_rows + num_columns - 1)]
    return np.ascontiguousarray(sheared.reshape(num_rows, -1).T)
