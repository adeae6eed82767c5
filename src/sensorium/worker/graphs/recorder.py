"""Captures the work of a function on the device as CUDA graphs, so that it can be replayed.

A recording may be split into several graphs: at each break between two of them, something runs that
can't be captured.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from tqdm import tqdm

logger = logging.getLogger(__name__)
Break = Callable[[int], None]  # called with the index of a break, from 0 on


def ignore_break(_: int) -> None:
    """Do nothing at a break, which is the default of `Recording.replay`."""


class Recording(Protocol):
    """A function's work on the device that was captured, for example as CUDA graphs."""

    def replay(self, at_break: Break = ignore_break) -> None:
        """Repeat the captured work on the same memory, with its present content."""


class Recorder(Protocol):
    """An interface for capturing a function's work; tests have one that needs no GPU."""

    def record(self, function: Callable[[Break], None]) -> Recording:
        """Run a function once, and return a recording of the work that it started on the device.

        The function must read and write fixed memory only, and must never wait for the device.
        Wherever the capture has to be split, it calls the `Break` that it gets.
        """


class CudaRecorder:
    """A recorder that captures one CUDA graph for each segment between two breaks.

    The graphs share one pool of memory, since only one of them runs at a time. Capture the largest
    size first: all others then fit into its memory. That works only if no tensor that was made
    during a capture is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._renew()

    def _renew(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)
        # A pool can't be used again when its last graph is gone. So the recorder holds one.
        self._held: Recording | None = None

    def record(self, function: Callable[[Break], None]) -> Recording:
        try:
            self._held = self._record(function)
        except BaseException:
            self._renew()  # torch may have left the pool and the stream in disorder
            raise
        return self._held

    def _record(self, function: Callable[[Break], None]) -> Recording:
        graphs = [torch.cuda.CUDAGraph()]

        def begin(graph: torch.cuda.CUDAGraph) -> None:
            # What other threads do on the device meanwhile is no error.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def break_here(_: int) -> None:
            graphs[-1].capture_end()
            graphs.append(torch.cuda.CUDAGraph())
            begin(graphs[-1])

        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with pause_garbage_collection(), torch.cuda.stream(self._stream):
            begin(graphs[0])
            try:
                function(break_here)
            finally:
                graphs[-1].capture_end()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return _CudaRecording(graphs)


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Let Python free no objects in reference cycles, inside a `with`.

    Such an object may hold a CUDA graph. CUDA forbids destroying a graph while another one is
    captured, and the capture would fail.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _CudaRecording:
    """A recording that consists of CUDA graphs, one for each segment, in the order of replay."""

    graphs: Sequence[torch.cuda.CUDAGraph]

    def replay(self, at_break: Break = ignore_break) -> None:
        *others, last = self.graphs
        for index, graph in enumerate(others):
            graph.replay()
            at_break(index)
        last.replay()


def capture_sizes(
    sizes: Sequence[int], capture: Callable[[int], str | None], *, what: str, use_tqdm: bool
) -> str | None:
    """Call `capture` for each of the ascending sizes, the largest first, until one fails.

    Return the reason if one fails, which `capture` returns or raises, or else None.
    """
    for size in tqdm(
        sizes[::-1],
        desc=f"capturing {what}",
        unit="size",
        disable=None if use_tqdm else True,  # None: show it only on a terminal
        leave=False,
    ):
        try:
            reason = capture(size)
        except Exception as error:
            # A function that can't be captured raises one of many errors, most of them CUDA's.
            logger.debug("capturing %s of size %d failed", what, size, exc_info=True)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if reason is not None:
            return reason
    return None


def find_distance(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Return the largest difference of two results, or None if it is only rounding in `dtype`."""
    scale = max(float(expected.abs().max()), 1.0)
    distance = float((found - expected).abs().max())
    is_near = distance <= 64 * torch.finfo(dtype).eps * scale  # false for NaN
    return None if is_near else f"{distance:.3g}"


def find_size(sizes: Sequence[int], number: int) -> int | None:
    """Return the smallest of the ascending sizes that is at least `number`, or None."""
    index = bisect_left(sizes, number)
    return sizes[index] if index < len(sizes) else None
