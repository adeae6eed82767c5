"""Computes paged attention with our own kernels for decoding requests, and torch's for prompts.

Our Triton kernels read pages in place, in every precision and for every head size. Prompts are
computed by `torch_backend`, because its attention over many queries is fast enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sensorium.layers import kernels
from sensorium.layers.attention.backend import GroupTables, LayerCache
from sensorium.layers.attention.torch_backend import TorchPagedAttention
from sensorium.layers.kv_layout import LayerSpec
from sensorium.utils.arrays import to_device


class TritonPagedAttention(TorchPagedAttention):
    name = "triton"

    def __init__(
        self,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,  # noqa: ARG002  (every backend is made with the same arguments)
    ) -> None:
        super().__init__(block_size=block_size, dtype=dtype)
        from sensorium.layers.kernels.decoding import attend_decoding, store_new_tokens

        self._attend = attend_decoding
        self._store_new_tokens = store_new_tokens

    @staticmethod
    def find_obstacle(
        _layers: Sequence[LayerSpec], _dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Return why the Triton kernels can't be used on the device, or None if they can."""
        return kernels.find_obstacle(device)

    def _store(
        self, cache: LayerCache, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self._store_new_tokens(cache.keys, cache.values, slots, key, value)

    def _plan_decodes(
        self, group: GroupTables, seq_lens: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Return the block tables [b, blocks], lengths [b] and window of b decoding requests."""
        # int32 as in CUDA graphs, so that the kernel compiled for them is used here as well.
        block_tables = group.block_tables[: len(seq_lens)].to(torch.int32)
        lengths = to_device(torch.tensor(seq_lens), block_tables.device)
        return block_tables, lengths, group.window

    def _attend_decoding(
        self,
        cache: LayerCache,
        queries: torch.Tensor,
        decodes: Any,
        scaling: float | None,
        output: torch.Tensor,
    ) -> None:
        tables, lengths, window = decodes
        attended = self._attend(
            queries, cache.keys, cache.values, tables, lengths, scaling=scaling, window=window
        )
        output.copy_(attended)
