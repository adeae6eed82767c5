"""Finds when each token was said, from the attention of a decoder to the positions of a sound.

Attention is normalised and smoothed, averaged over the heads that follow the sound, and then the
monotonic path with the most attention is searched. A token's time is where the path enters its row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

POSITION_S = 0.02  # seconds of one position of the encoder

_DIAGONAL, _DOWN, _RIGHT = 0, 1, 2  # the step of a path into a cell


def find_token_times(
    attention: npt.NDArray[np.float32], *, num_positions: int, median_filter_width: int
) -> npt.NDArray[np.float64]:
    """Return the time of each token in seconds from the beginning of its window.

    `attention` is [heads, tokens, positions]. Positions from `num_positions` on are padding. The
    row of a token is the one in which it was read, so that its time is where it ends.
    """
    attention = attention[:, :, :num_positions]
    if 0 in attention.shape:
        return np.zeros(attention.shape[1])
    mean = np.zeros(attention.shape[1:], np.float32)
    for head in attention:
        deviation = head.std(axis=0)
        # All tokens alike say nothing about a position, and must not divide by zero.
        scale = np.where(deviation > 0, deviation, np.inf)
        mean += filter_median((head - head.mean(axis=0)) / scale, median_filter_width)
    rows, columns = find_path(-mean.astype(np.float64) / len(attention))
    is_first = np.diff(rows, prepend=-1) > 0
    return columns[is_first].astype(np.float64) * POSITION_S


def filter_median(values: npt.NDArray[np.float32], width: int) -> npt.NDArray[np.float32]:
    """Return the running median of `width` values along the last axis, mirrored at the ends.

    `width` is odd. A row that is too short to be mirrored is returned as it is.
    """
    half = width // 2
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

    The path goes from the first to the last cell in steps right, down or diagonally (dynamic time
    warping). Where the two best ways are equal, it comes from the left.
    """
    num_rows, num_columns = cost.shape
    if num_columns == 1:
        return np.arange(num_rows), np.zeros(num_rows, np.int64)
    steps = _fill_steps(np.ascontiguousarray(cost).ravel(), num_rows, num_columns)
    row, column = num_rows, num_columns
    path = []
    # Each step lowers the row or the column, and the first row and column have one way only.
    while row > 0 and column > 0:
        path.append((row - 1, column - 1))
        step = steps[row + column, row]
        row -= step != _RIGHT
        column -= step != _DOWN
    rows, columns = np.array(path[::-1]).T
    return rows, columns


def _fill_steps(
    flat: npt.NDArray[np.float64], num_rows: int, num_columns: int
) -> npt.NDArray[np.int8]:
    """Return the step of the best path into each cell as [row + column, row], both from 1.

    The cells of one anti-diagonal don't depend on each other, so each is computed at once. Sums
    are float32, as in OpenAI's code, so that near ties are decided alike.
    """
    steps = np.zeros((num_rows + num_columns + 1, num_rows + 1), np.int8)
    # Sums of the last two diagonals and of this one, by row. Row 0 and column 0 stand before the
    # matrix: infinite, except for the corner where all paths begin.
    before, last, current = (np.full(num_rows + 1, np.inf, np.float32) for _ in range(3))
    before[0] = 0
    for number in range(2, num_rows + num_columns + 1):
        first, stop = max(1, number - num_columns), min(num_rows, number - 1) + 1
        diagonal, down, right = (
            before[first - 1 : stop - 1],
            last[first - 1 : stop - 1],
            last[first:stop],
        )
        begin = (first - 1) * num_columns + number - first - 1
        stride = num_columns - 1
        costs = flat[begin : begin + (stop - first - 1) * stride + 1 : stride]
        is_diagonal = (diagonal < down) & (diagonal < right)
        is_down = (down < diagonal) & (down < right)
        best = np.where(is_diagonal, diagonal, np.where(is_down, down, right))
        current[first:stop] = costs + best
        steps[number, first:stop] = np.where(
            is_diagonal, _DIAGONAL, np.where(is_down, _DOWN, _RIGHT)
        )
        before, last, current = last, current, before
        current[0] = np.inf  # the corner belongs to the first diagonal only
    return steps
