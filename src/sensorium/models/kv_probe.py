"""Finds out the KV layout of a decoder from one small forward pass.

So the configs of single families don't have to be interpreted.
"""

from __future__ import annotations

import torch

from sensorium.layers.kv_layout import LayerSpec
from sensorium.types.errors import ModelError


class KVProbe:
    """An `AttentionCall` that records the shapes of each layer's keys and values.

    Layers that share keys and values pass the very same tensors.
    """

    def __init__(self) -> None:
        # Layer index -> its keys and values. They are kept alive, because tensors are recognised by
        # their addresses, and later ones could get the address of one that was freed.
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
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
        if layer_index in self._specs:
            # Keys and values are stored by layer, so the second call would overwrite the first.
            raise ModelError(
                f"layer {layer_index} attends more than once in a forward pass: not supported"
            )
        source = next(
            (
                index
                for index, (known_key, known_value) in self._tensors.items()
                if known_key.data_ptr() == key.data_ptr()
                and known_value.data_ptr() == value.data_ptr()
            ),
            layer_index,
        )
        self._tensors[layer_index] = (key, value)
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
