"""One pair of tensors per layer that stores, shared by those that don't."""

from __future__ import annotations

import torch

from sensorium.layers.kv_layout import LayerSpec, group_layers
from sensorium.types.scheduling import KVCacheGroup
from sensorium.worker.kv_cache import KVCache


def layer(index: int, *, window: int | None = None, source: int | None = None) -> LayerSpec:
    return LayerSpec(
        layer_index=index,
        num_kv_heads=2,
        key_dim=8,
        value_dim=4,
        window=window,
        source=index if source is None else source,
    )


def make_cache(*layers: LayerSpec) -> KVCache:
    groups = group_layers(layers)
    return KVCache(
        groups,
        [KVCacheGroup(num_blocks=5 + i, window=g.window) for i, g in enumerate(groups)],
        block_size=4,
        dtype=torch.float16,
        device=torch.device("cpu"),
    )


def test_each_layer_has_the_blocks_of_its_group() -> None:
    cache = make_cache(layer(0, window=3), layer(1))
    assert (cache[1].group_index, cache[0].group_index) == (0, 1)
    assert cache[1].keys.shape == (5, 4, 2, 8)
    assert cache[1].values.shape == (5, 4, 2, 4)
    assert cache[0].keys.shape == (6, 4, 2, 8)
    assert cache[0].keys.dtype == torch.float16


def test_a_sharing_layer_reads_the_memory_of_its_source() -> None:
    cache = make_cache(layer(0), layer(1), layer(2, source=0))
    assert cache[2].is_shared
    assert not cache[0].is_shared
    assert cache[2].keys.data_ptr() == cache[0].keys.data_ptr()
    assert cache[2].values.data_ptr() == cache[0].values.data_ptr()
    assert cache[1].keys.data_ptr() != cache[0].keys.data_ptr()


def test_the_cache_starts_zeroed_because_masked_nans_would_still_be_read() -> None:
    cache = make_cache(layer(0))
    assert cache[0].keys.abs().max() == 0
    assert cache[0].values.abs().max() == 0


def test_tensors_are_zero_and_aligned_as_torchs_own() -> None:
    cache = make_cache(layer(0), layer(1))
    for tensor in (cache[0].keys, cache[0].values, cache[1].keys, cache[1].values):
        assert not tensor.any()
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0


def test_tensors_do_not_overlap() -> None:
    cache = make_cache(layer(0), layer(1))
    cache[0].keys.fill_(1)
    assert not cache[0].values.any()
    assert not cache[1].keys.any()
