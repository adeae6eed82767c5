"""Learns the KV layout of a decoder by watching one small forward pass, instead of reading
family-specific configs.
"""

from __future__ import annotations

import torch

from sensorium.layers.kv_layout import LayerSpec


class KVProbe:
    """An `AttentionCall` that notes what each layer brings. Layers that share keys bring the
    very same tensor.
    """

    def __init__(self) -> None:
        self._keys: dict[int, torch.Tensor] = {}
        self._specs: dict[int, LayerSpec] = {}

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        del scaling
        source = next(
            (index for index, known in self._keys.items() if known.data_ptr() == key.data_ptr()),
            layer_index,
        )
        self._keys[layer_index] = key  # kept alive, so that no later key can take its address
        self._specs[layer_index] = LayerSpec(
            layer_index=layer_index,
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            window=window,
            source=source,
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(self._specs[index] for index in sorted(self._specs))
