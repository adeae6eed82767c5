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
    """The shape of the keys and values that one decoder layer keeps in the KV cache."""

    layer_index: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    # The layer that stores the keys and values that this one reads. It is another layer if both
    # share them.
    source: int
    window: int | None = None  # None: the layer attends to all earlier tokens
    is_cross: bool = False  # it attends to the encoded media of a request, not to its tokens

    @property
    def num_elements_per_token(self) -> int:
        """Return how many numbers the layer stores per token: 0 if it reads another layer's."""
        if self.source != self.layer_index:
            return 0
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """A group of layers with the same attention window, which share one block table."""

    window: int | None  # the tokens that a token attends to; None: all earlier ones
    layers: tuple[LayerSpec, ...]
    is_cross: bool = False  # its layers attend to the encoded media of a request

    def num_bytes_per_block(self, *, block_size: int, element_size: int) -> int:
        num_elements = sum(layer.num_elements_per_token for layer in self.layers)
        return num_elements * block_size * element_size


def group_layers(layers: Sequence[LayerSpec]) -> tuple[LayerGroup, ...]:
    """Return the layers in groups of the same attention window; the one without a window is first.

    Layers with cross-attention are the last group. Raise `ModelError` if a layer shares the keys
    and values of a layer with another window.
    """
    window_of = {layer.layer_index: layer.window for layer in layers}
    for layer in layers:
        if layer.window != window_of[layer.source]:
            raise ModelError(
                f"layer {layer.layer_index} shares keys and values with layer {layer.source}, "
                "which has another attention window; that is not supported"
            )
    kinds = sorted(
        {(layer.is_cross, layer.window) for layer in layers},
        key=lambda kind: (kind[0], kind[1] is not None, kind[1] or 0),
    )
    return tuple(
        LayerGroup(
            window=window,
            is_cross=is_cross,
            layers=tuple(
                layer for layer in layers if (layer.is_cross, layer.window) == (is_cross, window)
            ),
        )
        for is_cross, window in kinds
    )


def plan_kv_cache(
    groups: Sequence[LayerGroup],
    *,
    memory_bytes: int,
    block_size: int,
    element_size: int,  # of one number, in bytes
    max_tokens_per_window_group: int,
) -> tuple[KVCacheGroup, ...]:
    """Return the number of KV cache blocks of each group, for the same number of tokens in each.

    Together the blocks fill `memory_bytes`. A group with a window never needs blocks for more than
    `max_tokens_per_window_group` tokens; if that is less than its share, the other groups get the
    rest. One block of each group is reserved as the null block. Raise `ModelError` if the memory is
    too small for two blocks of each group.
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
            f"but kv_cache_memory_bytes is {memory_bytes}: give it more memory"
        )
    return tuple(
        KVCacheGroup(
            num_blocks=num_blocks if bound is None else min(num_blocks, bound), window=g.window
        )
        for g, bound in zip(groups, bounds, strict=True)
    )


def plan_cross_cache(
    groups: Sequence[LayerGroup],
    *,
    memory_bytes: int,
    block_size: int,
    element_size: int,
    max_tokens: int,
    max_cross_positions: int,
) -> tuple[KVCacheGroup, ...]:
    """Return the number of KV cache blocks of each group of an encoder-decoder model.

    All groups have blocks for the same number of requests: each has `max_tokens` tokens, and
    attends to `max_cross_positions` positions of its media. Raise `ModelError` if not even one
    request fits into the memory.
    """
    lengths = [max_cross_positions if group.is_cross else max_tokens for group in groups]
    counts = [-(-length // block_size) for length in lengths]
    sizes = [
        g.num_bytes_per_block(block_size=block_size, element_size=element_size) for g in groups
    ]
    request_bytes = sum(count * size for count, size in zip(counts, sizes, strict=True))
    num_requests = (memory_bytes - sum(sizes)) // request_bytes
    if num_requests < 1:
        raise ModelError(
            f"the KV cache needs at least {request_bytes + sum(sizes)} bytes, "
            f"but kv_cache_memory_bytes is {memory_bytes}: give it more memory"
        )
    return tuple(
        KVCacheGroup(num_blocks=num_requests * count + 1, window=g.window, is_cross=g.is_cross)
        for g, count in zip(groups, counts, strict=True)
    )


def _num_equal_blocks(sizes: Sequence[int], bounds: Sequence[int | None], memory_bytes: int) -> int:
    """Return the largest n for which min(n, bound) blocks of every group fit into the memory."""

    # For each group: the bytes of one block, and the most blocks that it needs (None: no bound).
    def get_num_bytes(num_blocks: int) -> int:
        return sum(
            size * (num_blocks if bound is None else min(num_blocks, bound))
            for size, bound in zip(sizes, bounds, strict=True)
        )

    candidates = range(1, memory_bytes // max(1, min(sizes)) + 1)
    return bisect_right(candidates, memory_bytes, key=get_num_bytes)
