"""Computes paged attention with our own kernels for decoding requests, and torch's for prompts.

Our kernels read pages in place, in every precision and for every head size. Prompts use the gather
of `torch_backend`, because its attention over many queries is fast enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sensorium.layers import kernels
from sensorium.layers.attention.backend import GroupTables, LayerCache
from sensorium.layers.attention.torch_backend import TorchPagedAttention
from sensorium.layers.kv_layout import LayerSpec
from sensorium.utils.arrays import to_device


def find_obstacle(
    layers: Sequence[LayerSpec], *, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why these layers can't be computed here, or `None` if they can."""
    del layers, dtype
    return kernels.find_obstacle(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRows:
    """The input of the kernel for the decoding requests of a step, for one group of layers."""

    block_tables: torch.Tensor  # int32 [b, blocks]
    seq_lens: torch.Tensor  # int [b]
    window: int | None


class TritonPagedAttention(TorchPagedAttention):
    name = "triton"

    def __init__(self, *, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(block_size=block_size, dtype=dtype)
        del device
        from sensorium.layers.kernels.decode_attention import attend_decoding
        from sensorium.layers.kernels.kv_store import store_new_tokens

        self._attend = attend_decoding
        self._store_new_tokens = store_new_tokens

    def _store(
        self, cache: LayerCache, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self._store_new_tokens(cache.keys, cache.values, slots, key, value)

    def _plan_decodes(self, group: GroupTables, seq_lens: tuple[int, ...]) -> DecodingRows:
        device = group.block_tables.device
        return DecodingRows(
            # int32 as in CUDA graphs, so that the kernel compiled for them is used here as well.
            block_tables=group.block_tables[: len(seq_lens)].to(torch.int32),
            seq_lens=to_device(torch.tensor(seq_lens), device),
            window=group.window,
        )

    def _attend_decoding(
        self,
        cache: LayerCache,
        queries: torch.Tensor,
        decodes: Any,
        scaling: float | None,
        output: torch.Tensor,
    ) -> None:
        output.copy_(
            self._attend(
                queries,
                cache.keys,
                cache.values,
                decodes.block_tables,
                decodes.seq_lens,
                scaling=scaling,
                window=decodes.window,
            )
        )
