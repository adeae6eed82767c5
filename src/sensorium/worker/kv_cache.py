"""The paged key and value tensors of every layer. Which block holds what is the core's business."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from sensorium.layers.attention.backend import LayerCache
from sensorium.layers.kv_layout import LayerGroup
from sensorium.types.scheduling import KVCacheGroup

_ALIGNMENT = 64  # bytes, as torch's own allocator gives


class KVCache:
    """Owns the tensors, zeroed at the start: padding reads the null block, and garbage there
    could be NaN.
    """

    def __init__(
        self,
        layer_groups: Sequence[LayerGroup],
        groups: Sequence[KVCacheGroup],
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layers: dict[int, LayerCache] = {}
        for group_index, (layer_group, group) in enumerate(zip(layer_groups, groups, strict=True)):
            for layer in layer_group.layers:
                if layer.source == layer.layer_index:
                    shape = (group.num_blocks, block_size, layer.num_kv_heads)
                    self._layers[layer.layer_index] = LayerCache(
                        keys=_make_zeros(*shape, layer.key_dim, dtype=dtype, device=device),
                        values=_make_zeros(*shape, layer.value_dim, dtype=dtype, device=device),
                        group_index=group_index,
                        is_shared=False,
                    )
                else:
                    source = self._layers[layer.source]
                    self._layers[layer.layer_index] = LayerCache(
                        keys=source.keys,
                        values=source.values,
                        group_index=group_index,
                        is_shared=True,
                    )

    def clear_blocks(self, group_index: int, block_ids: torch.Tensor) -> None:
        """Zero blocks that a step fills only in part. What an earlier request left there is masked,
        but masked values are multiplied by zero, which a NaN survives.
        """
        for layer in self._layers.values():
            if layer.group_index == group_index and not layer.is_shared:
                layer.keys.index_fill_(0, block_ids, 0)
                layer.values.index_fill_(0, block_ids, 0)

    def __getitem__(self, layer_index: int) -> LayerCache:
        return self._layers[layer_index]


def _make_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.zeros` writes every page, about a second per GiB. numpy takes pages that the system
    zeroes when they are first touched.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8))
    start = -buffer.data_ptr() % _ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).view(shape)
