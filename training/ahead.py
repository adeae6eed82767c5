"""A thread that makes training steps ready ahead of their use.

While the device goes backward through one step, the next one is sent, its pictures are drawn and
its audio is computed, on a stream of their own. The loop itself sends nothing: sending would wait
for all that the device has still to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import numpy as np
import torch

from training.batches import Batch

Ready = tuple[list[Batch], list[dict[str, torch.Tensor]]]
Perceive = Callable[[Batch], dict[str, torch.Tensor]]


class Ahead:
    """Iterates over batches and their processed media; an error of the thread is raised."""

    def __init__(self, steps: Iterator[Any], perceive: Perceive, device: str) -> None:
        self._steps, self._perceive, self._device = steps, perceive, device
        self._is_cuda = device.startswith("cuda")
        self._ready: Queue[tuple[Ready, Any] | BaseException] = Queue(maxsize=2)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            stream: Any = torch.cuda.Stream() if self._is_cuda else None  # type: ignore[no-untyped-call]
            for step in self._steps:
                batches = [_as_tensors(batch) for batch in step.values()]
                with torch.cuda.stream(stream):  # nothing without a stream
                    perceived = [self._perceive(batch) for batch in batches]
                    if stream is not None:
                        batches = [self._send(batch) for batch in batches]
                event = stream.record_event() if stream is not None else None
                self._ready.put(((batches, perceived), event))
        except BaseException as error:
            self._ready.put(error)

    def _send(self, batch: Batch) -> Batch:
        """Send all but the audio, because its spectra are on the device already."""
        return {
            name: value.pin_memory().to(self._device, non_blocking=True)
            if torch.is_tensor(value) and name != "sounds"
            else value
            for name, value in batch.items()
        }

    def __next__(self) -> Ready:
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        ready, event = found
        if event is not None:
            current = torch.cuda.current_stream()
            current.wait_event(event)
            for tensors in (*ready[0], *ready[1]):
                for tensor in tensors.values():
                    if torch.is_tensor(tensor) and tensor.is_cuda:
                        tensor.record_stream(current)
        return ready

    def __iter__(self) -> Iterator[Ready]:
        return self


def _as_tensors(batch: Batch) -> Batch:
    """Turn small arrays into tensors; a tensor that is shared between processes costs a file."""
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in batch.items()
    }
