"""Packs the arrays of a step into one buffer of 64-bit words, for one copy to the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from sensorium.types.errors import InvariantError


class StagingBuffer:
    """A host buffer and a device buffer that are kept from step to step and grow if needed.

    On a CPU both are the same memory.
    """

    def __init__(self, *, device: torch.device, num_words: int = 1 << 14) -> None:
        self._device_type = device
        # Recorded behind each copy: when it is reached, the host memory may be written again.
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._allocate(num_words)

    def _allocate(self, num_words: int) -> None:
        is_cuda = self._device_type.type == "cuda"
        self._host = torch.zeros(num_words, dtype=torch.int64, pin_memory=is_cuda)
        self._device = (
            torch.zeros(num_words, dtype=torch.int64, device=self._device_type)
            if is_cuda
            else self._host
        )

    @property
    def address(self) -> int:
        """Return the address of the device memory, which changes when the buffer grows."""
        return self._device.data_ptr()

    def upload(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, torch.Tensor]:
        """Return int64 and float64 arrays as device tensors, valid until the next upload."""
        for name, array in arrays.items():
            if array.dtype not in (np.int64, np.float64):
                raise InvariantError(f"{name} is {array.dtype}, not int64 or float64")
        num_words = sum(array.size for array in arrays.values())
        if num_words > len(self._host):
            self._allocate(2 * num_words)
        if self._copied is not None:
            # The last copy may not be done: in steps that sample nothing, the host runs ahead.
            self._copied.synchronize()
        words = self._host.numpy()
        spans = {}
        start = 0
        for name, array in arrays.items():
            end = start + array.size
            words[start:end] = array.reshape(-1).view(np.int64)
            spans[name] = (start, end)
            start = end
        if self._copied is not None:
            self._device[:start].copy_(self._host[:start], non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self._device_type))
        return {name: self._view(array, *spans[name]) for name, array in arrays.items()}

    def _view(self, array: npt.NDArray[np.generic], start: int, end: int) -> torch.Tensor:
        words = self._device[start:end].view(array.shape)
        return words.view(torch.float64) if array.dtype == np.float64 else words
