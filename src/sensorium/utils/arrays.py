"""Arrays that grow, and copies of tensors to a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


class GrowingArray:
    """An append-only array of integers that can be read as a numpy array without a copy."""

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


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on the device, without making the host wait for the copy.

    To a GPU it goes through pinned memory, because a copy from pageable memory waits for the
    device. torch's allocator of pinned memory reuses a block only after the copies that read it.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
