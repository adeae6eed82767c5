"""Records what a function does on the device, so that it can be done again in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Tensors = tuple[torch.Tensor, ...]


class Recording(Protocol):
    """A function's work on the device. `outputs` has the results of the last replay."""

    outputs: Tensors

    def replay(self) -> None:
        """Do the work again, on what the same memory holds now."""


class Recorder(Protocol):
    def record(self, function: Callable[[], Tensors]) -> Recording:
        """Record a function that reads fixed memory and never waits for the device."""


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Tensors) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()


class CudaRecorder:
    """Captures CUDA graphs. They share one pool of memory, since only one of them runs at a time.

    Capture the largest first: the others then find room in what it needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, function: Callable[[], Tensors]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                outputs = function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return _CudaRecording(graph, outputs)
