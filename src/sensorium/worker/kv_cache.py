"""Holds the paged key and value tensors of all layers. The core assigns the blocks to requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sensorium.layers.attention.backend import LayerCache
from sensorium.layers.kv_layout import LayerGroup
from sensorium.types.scheduling import KVCacheGroup

_ALIGNMENT = 64  # bytes, the alignment of torch's own allocator


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """The joined tensors of a group's layers of one shape, so that one call clears a block."""

    group_index: int
    keys: torch.Tensor  # [layers, blocks, block_size, K, D]
    values: torch.Tensor


class KVCache:
    """The key and value tensors of all attention layers, divided into blocks of tokens.

    All tensors are zeroed at the start, because padding reads block 0, and uninitialised memory may
    contain NaN.
    """

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        groups: Sequence[KVCacheGroup],  # in the same order
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layers: dict[int, LayerCache] = {}
        self._stacks: list[_Stack] = []
        for group_index, (layer_group, group) in enumerate(zip(layer_groups, groups, strict=True)):
            # A layer with another layer as its source shares the tensors of that layer.
            own = [layer for layer in layer_group.layers if layer.source == layer.layer_index]
            shapes = {(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in own}
            for shape in sorted(shapes):
                num_kv_heads, key_dim, value_dim = shape
                layers = [x for x in own if (x.num_kv_heads, x.key_dim, x.value_dim) == shape]
                size = (len(layers), group.num_blocks, block_size, num_kv_heads)
                is_by_head = group.is_cross and device.type == "cpu"
                make = _make_zeros_by_head if is_by_head else _make_zeros
                stack = _Stack(
                    group_index=group_index,
                    keys=make(*size, key_dim, dtype=dtype, device=device),
                    values=make(*size, value_dim, dtype=dtype, device=device),
                )
                self._stacks.append(stack)
                for place, layer in enumerate(layers):
                    self._layers[layer.layer_index] = LayerCache(
                        keys=stack.keys[place],
                        values=stack.values[place],
                        group_index=group_index,
                        is_shared=False,
                    )
            for layer in layer_group.layers:
                if layer.source != layer.layer_index:
                    self._layers[layer.layer_index] = replace(
                        self._layers[layer.source], group_index=group_index, is_shared=True
                    )

        self._stored = {
            index: replace(layer, is_shared=True) for index, layer in self._layers.items()
        }

    def clear_blocks(self, group_index: int, block_ids: torch.Tensor) -> None:
        """Set the keys and values of these blocks to zero, in all layers of a group.

        It is for blocks that a step fills only in part. What an earlier request left in them is
        masked, but masking multiplies by zero, and NaN times zero is NaN.
        """
        for stack in self._stacks:
            if stack.group_index == group_index:
                stack.keys.index_fill_(1, block_ids, 0)
                stack.values.index_fill_(1, block_ids, 0)

    def __getitem__(self, layer_index: int) -> LayerCache:
        return self._layers[layer_index]

    def get_stored(self, layer_index: int) -> LayerCache:
        """Return the cache of a layer with new keys and values already stored by a CUDA graph."""
        return self._stored[layer_index]


def _make_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros, on a CPU without the cost of writing them.

    There `torch.zeros` writes every page, which takes about a second per GiB. numpy gets pages that
    the system zeroes when they are first used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8))
    start = -buffer.data_ptr() % _ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).view(shape)


def _make_zeros_by_head(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros [layers, blocks, block_size, K, D] in which each head lies in one piece.

    A token attends to all positions of its media, so a CPU reads them faster in this order.
    """
    layers, blocks, block_size, heads, width = shape
    zeros = _make_zeros(layers, heads, blocks, block_size, width, dtype=dtype, device=device)
    return zeros.permute(0, 2, 3, 1, 4)
