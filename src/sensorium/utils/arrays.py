"""Arrays that grow at their end, and copies between the host and a device."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]
Key = TypeVar("Key", bound=Hashable)


class GrowingArray:
    """An array of integers that grows at its end, and is read as a numpy array without a copy."""

    def __init__(self, values: Sequence[int] = ()) -> None:
        self._buffer: IntArray = np.array(values, dtype=np.int64)
        self._length = len(values)

    def __len__(self) -> int:
        return self._length

    def append(self, value: int) -> None:
        if self._length < len(self._buffer):
            self._buffer[self._length] = value
            self._length += 1
        else:
            self.extend((value,))

    def extend(self, values: Sequence[int]) -> None:
        end = self._length + len(values)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer), 16), dtype=np.int64)
            grown[: self._length] = self.values
            self._buffer = grown
        self._buffer[self._length : end] = values
        self._length = end

    def drop(self, count: int) -> None:
        """Remove the first `count` values."""
        self._buffer = self.values[count:].copy()
        self._length = len(self._buffer)

    @property
    def values(self) -> IntArray:
        """The values so far as a view of the array, which is valid until the next `extend`."""
        return self._buffer[: self._length]


def to_device(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the tensor on the device and in the dtype, without making the host wait for a copy.

    On its way to a GPU the tensor is first copied to pinned memory, because a copy from pageable
    memory waits for the device. PyTorch does not reuse the pinned memory before the second copy is
    done. The first copy changes the dtype, so that a smaller dtype leaves less for the second.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device, dtype)
    pinned = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


class Download(Generic[Key]):
    """Copies of tensors from the device to the host, which begin at once.

    The host waits for them in `read`, but not for work that the device gets later.
    """

    def __init__(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._copies: dict[Key, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if tensor.device.type == "cuda":
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._copies[name] = copy.copy_(tensor, non_blocking=True)
                self._event = self._event or torch.cuda.Event()  # type: ignore[no-untyped-call]
            else:
                self._copies[name] = tensor.clone()  # later work may overwrite the tensor
        if self._event is not None:
            self._event.record()

    def arrives_within(self, seconds: float) -> bool:
        """Spin until the tensors have arrived, and return True, or False after `seconds`.

        Without tensors on a GPU, return False at once.
        """
        if self._event is None:
            return False
        deadline = time.perf_counter() + seconds
        while not self._event.query():  # type: ignore[no-untyped-call]
            if time.perf_counter() > deadline:
                return False
        return True

    def read(self) -> dict[Key, torch.Tensor]:
        """Wait until the tensors have arrived, and return them."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


class StagingBuffer:
    """A buffer that joins the arrays of a step, for a single copy to the device.

    It has `num_words` 64-bit words in host memory and on the device, which are used again in each
    step, and grow if needed. On a CPU both are the same memory.
    """

    def __init__(self, *, device: torch.device, num_words: int = 1 << 14) -> None:
        self._device_type = device
        # Recorded behind each copy: when it is reached, the host memory may be written again.
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._allocate(num_words)

    def _allocate(self, num_words: int) -> None:
        is_cuda = self._device_type.type == "cuda"
        self._host = torch.zeros(num_words, dtype=torch.int64, pin_memory=is_cuda)
        self._device = self._host.to(self._device_type)

    @property
    def address(self) -> int:
        """Return the address of the device memory, which changes when the buffer grows."""
        return self._device.data_ptr()

    def upload(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, torch.Tensor]:
        """Copy int64 or float64 arrays to the device, as tensors valid until the next upload."""
        for name, array in arrays.items():
            if array.dtype not in (np.int64, np.float64):
                raise TypeError(
                    f"array {name!r} has dtype {array.dtype}; it must be int64 or float64"
                )
        num_words = sum(array.size for array in arrays.values())
        if num_words > len(self._host):
            self._allocate(2 * num_words)
        if self._copied is not None:
            # The last copy may not be done: after a step that samples nothing, the host continues
            # without waiting for the device.
            self._copied.synchronize()
        words = self._host.numpy()
        tensors = {}
        start = 0
        for name, array in arrays.items():
            end = start + array.size
            words[start:end] = array.reshape(-1).view(np.int64)
            tensor = self._device[start:end].view(array.shape)
            tensors[name] = tensor.view(torch.float64) if array.dtype == np.float64 else tensor
            start = end
        if self._copied is not None:
            self._device[:start].copy_(self._host[:start], non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self._device_type))
        return tensors
