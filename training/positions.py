"""Where each token stands in time, height and width, as the stock model counts."""

from __future__ import annotations

import numpy as np

from training.architecture import POSITIONS_PER_SECOND

SECONDS_PER_STEP = 1.0  # two frames at two frames a second


def make_positions(segments: list[int | tuple[int, int, int]], length: int) -> np.ndarray:
    """Return positions [3, length] of a sequence of segments, with padding behind them.

    A segment is a number of plain tokens, or the steps, rows and columns of a picture or video.
    """
    positions = np.zeros((3, length), np.int32)
    at, start = 0, 0
    for segment in segments:
        if isinstance(segment, int):
            positions[:, at : at + segment] = start + np.arange(segment)
            at, start = at + segment, start + segment
            continue
        steps, rows, columns = segment
        grid = np.indices((steps, rows, columns)).reshape(3, -1)
        grid[0] = (grid[0] * SECONDS_PER_STEP * POSITIONS_PER_SECOND).astype(int)
        positions[:, at : at + grid.shape[1]] = start + grid
        at, start = at + grid.shape[1], start + int(grid.max()) + 1
    return positions
