"""Records what a function does on the device, so that it can be done again in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Recording(Protocol):
    """A function's work on the device."""

    def replay(self) -> None:
        """Do the work again, on what the same memory holds now."""


class Recorder(Protocol):
    def record(self, function: Callable[[], None]) -> Recording:
        """Record a function that reads and writes fixed memory and never waits for the device."""


class CudaRecorder:
    """Captures CUDA graphs. They share one pool of memory, since only one of them runs at a time.

    Capture the largest first: the others then find room in what it needed. That holds as long as
    nobody keeps a tensor that was made in a capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, function: Callable[[], None]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return graph
