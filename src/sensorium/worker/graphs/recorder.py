"""Records the work of a function on the device, so that one launch can repeat it.

`capture_sizes` does that for all sizes of an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from tqdm import tqdm

logger = logging.getLogger(__name__)


class Recording(Protocol):
    """The recorded work of a function on the device."""

    def replay(self) -> None:
        """Repeat the work on the same memory, with its present content."""


class Recorder(Protocol):
    def record(self, function: Callable[[], None]) -> Recording:
        """Record a function that reads and writes fixed memory and never waits for the device."""


class CudaRecorder:
    """A recorder that captures CUDA graphs.

    The graphs share one pool of memory, since only one of them runs at a time. Capture the largest
    first: the others then fit into its memory. That works only if no tensor that was made in a
    capture is kept.
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
