"""Finds the repeated blocks of a model, at which a long forward pass can report progress.

On a CPU a pass over a long prompt or a large picture may take minutes. One block of it takes
seconds at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def find_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost module lists: the layers of decoders and encoders."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from find_blocks(child)


def call_before_blocks(model: nn.Module, function: Callable[[], None]) -> int:
    """Call `function` before each run of a block from now on. Return the number of blocks."""

    def hook(module: nn.Module, arguments: Any) -> None:
        del module, arguments
        function()

    blocks = list(find_blocks(model))
    for block in blocks:
        block.register_forward_pre_hook(hook)
    return len(blocks)
