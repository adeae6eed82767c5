"""Records the work of a function on the device, so that a few launches can repeat it.

A recording may have breaks, at which something runs that can't be recorded. `capture_sizes` records
a function for all sizes of an engine.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from tqdm import tqdm

logger = logging.getLogger(__name__)
Break = Callable[[int], None]  # it is called at each break with the number of the break


def ignore_break(_: int) -> None:
    """Do nothing at a break."""


class Recording(Protocol):
    """The recorded work of a function on the device, in segments between its breaks."""

    def replay(self, at_break: Break = ignore_break) -> None:
        """Repeat the work on the same memory, with its present content."""


class Recorder(Protocol):
    """A way to record functions; tests have one that needs no GPU."""

    def record(self, function: Callable[[Break], None]) -> Recording:
        """Record a function that reads and writes fixed memory and never waits for the device.

        Its argument is a callback that it calls at each break.
        """


class CudaRecorder:
    """A recorder that captures one CUDA graph for each segment between two breaks.

    The graphs share one pool of memory, since only one of them runs at a time. Capture the largest
    first: the others then fit into its memory. That works only if no tensor that was made in a
    capture is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, function: Callable[[Break], None]) -> Recording:
        graphs = [torch.cuda.CUDAGraph()]

        def break_here(_: int) -> None:
            graphs[-1].capture_end()
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool)

        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            graphs[0].capture_begin(pool=self._pool)
            try:
                function(break_here)
            finally:
                graphs[-1].capture_end()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return _CudaRecording(graphs)


@dataclass(frozen=True, slots=True)
class _CudaRecording:
    """A graph for each segment, in their order."""

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
    """Capture ascending sizes, the largest first. Return why that is not possible, or `None`.

    `capture` captures one size. If it can't, it returns the reason or raises an error. `what` is
    the text of the progress bar.
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
    """Return how far a replay is from what was expected, or `None` if rounding explains it."""
    scale = max(float(expected.abs().max()), 1.0)
    distance = float((found - expected).abs().max())
    is_near = distance <= 64 * torch.finfo(dtype).eps * scale  # false for NaN
    return None if is_near else f"{distance:.3g}"


def find_size(sizes: Sequence[int], number: int) -> int | None:
    """Return the smallest of the ascending sizes that is at least `number`, if there is one."""
    index = bisect_left(sizes, number)
    return sizes[index] if index < len(sizes) else None
