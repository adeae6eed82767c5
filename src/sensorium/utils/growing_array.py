"""An append-only array of integers whose contents can be read as numpy without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class GrowingArray:
    def __init__(self, values: Sequence[int] = ()) -> None:
        self._buffer: IntArray = np.array(values, dtype=np.int64)
        self._length = len(values)

    def __len__(self) -> int:
        return self._length

    def extend(self, values: Sequence[int]) -> None:
        end = self._length + len(values)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer), 16), dtype=np.int64)
            grown[: self._length] = self.values
            self._buffer = grown
        self._buffer[self._length : end] = values
        self._length = end

    @property
    def values(self) -> IntArray:
        """A view that is valid until the next `extend`."""
        return self._buffer[: self._length]
