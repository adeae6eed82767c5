"""Describes the keys and values of each layer, and splits the memory of the KV cache among them.

There are only numbers here and no tensors. A *group* is a set of layers with the same window, which
therefore share one block table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from sensorium.types.errors import ModelError
from sensorium.types.scheduling import KVCacheGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The shape of one layer's keys and values."""

    layer_index: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None  # None: the layer attends to all earlier tokens
    # The layer that stores the keys and values that this one reads. It is another layer if both
    # share them.
    source: int

    @property
    def num_elements_per_token(self) -> int:
        """Return how many numbers the layer stores per token: 0 if it reads those of another."""
        if self.source != self.layer_index:
            return 0
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """The layers that share one block table, because they have the same window."""

    window: int | None
    layers: tuple[LayerSpec, ...]

    def num_bytes_per_block(self, *, block_size: int, element_size: int) -> int:
        num_elements = sum(layer.num_elements_per_token for layer in self.layers)
        return num_elements * block_size * element_size


def group_layers(layers: Sequence[LayerSpec]) -> tuple[LayerGroup, ...]:
    """Group layers by their window. The group without a window comes first.

    A layer that shares keys and values belongs to the group of its source.
    """
    window_of = {layer.layer_index: layer.window for layer in layers}
    for layer in layers:
        if layer.window != window_of[layer.source]:
            raise ModelError(
                f"layer {layer.layer_index} shares keys and values with layer {layer.source}, "
                "which has another attention window: not supported"
            )
    windows = sorted(set(window_of.values()), key=lambda window: (window is not None, window or 0))
    return tuple(
        LayerGroup(window=window, layers=tuple(layer for layer in layers if layer.window == window))
        for window in windows
    )


def plan_kv_cache(
    groups: Sequence[LayerGroup],
    *,
    memory_bytes: int,
    block_size: int,
    element_size: int,
    max_tokens_per_window_group: int,
) -> tuple[KVCacheGroup, ...]:
    """Split memory so that every group holds the same number of tokens.

    A group with a window never needs room for more than `max_tokens_per_window_group`. If that is
    less than its share, the other groups get the rest. One block of each group is the null block.
    """
    sizes = [
        g.num_bytes_per_block(block_size=block_size, element_size=element_size) for g in groups
    ]
    bounds = [
        None if g.window is None else -(-max_tokens_per_window_group // block_size) + 1
        for g in groups
    ]
    num_blocks = _num_equal_blocks(sizes, bounds, memory_bytes)
    if num_blocks < 2:
        raise ModelError(
            f"the KV cache needs at least {2 * sum(sizes)} bytes, "
            f"but kv_cache_memory_bytes is {memory_bytes}"
        )
    return tuple(
        KVCacheGroup(
            num_blocks=num_blocks if bound is None else min(num_blocks, bound), window=g.window
        )
        for g, bound in zip(groups, bounds, strict=True)
    )


def _num_equal_blocks(sizes: Sequence[int], bounds: Sequence[int | None], memory_bytes: int) -> int:
    """Return the largest n for which min(n, bound) blocks of every group fit into the memory."""

    def get_num_bytes(num_blocks: int) -> int:
        return sum(
            size * (num_blocks if bound is None else min(num_blocks, bound))
            for size, bound in zip(sizes, bounds, strict=True)
        )

    candidates = range(1, memory_bytes // max(1, min(sizes)) + 1)
    return bisect_right(candidates, memory_bytes, key=get_num_bytes)
