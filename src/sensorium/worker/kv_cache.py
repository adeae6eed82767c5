"""The paged key and value tensors of every layer. Which block holds what is the core's business."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sensorium.layers.attention.backend import LayerCache
from sensorium.layers.kv_layout import LayerGroup
from sensorium.types.scheduling import KVCacheGroup


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
                        keys=torch.zeros(*shape, layer.key_dim, dtype=dtype, device=device),
                        values=torch.zeros(*shape, layer.value_dim, dtype=dtype, device=device),
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
