"""Computes paged attention with torch's own `varlen_attn`, if it can read pages.

From torch 2.13 on it has the parameters for that, `block_table` and `seqused_k`. But its built-in
FA2 kernels refuse a block table. The FlashAttention-3 kernels accept one, with pages of any size
and heads of at most 256 numbers. They are a separate package (`flash_attn_interface`, Hopper only),
and torch uses them when asked to. The trial at start tests whether a build really works.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from sensorium.layers.attention.backend import LayerCache, StepLayout, find_common_obstacle
from sensorium.layers.attention.torch_backend import InPlaceAttention
from sensorium.layers.kv_layout import LayerSpec
from sensorium.types.errors import InvariantError
from sensorium.utils.arrays import to_device

_MAX_HEAD_DIM = 256
_KERNEL_PACKAGE = "flash_attn_interface"


def _find_function() -> Callable[..., Any] | None:
    """Return torch's `varlen_attn` if it can read a paged KV cache, or None if it can't."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"block_table", "seqused_k"} <= names.keys() else None


def _activate_kernels() -> None:
    """Make torch use FlashAttention 3 in the whole process, including the encoders."""
    from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

    if current_flash_attention_impl() != "FA3":
        activate_flash_attention_impl("FA3")


class VarlenAttention(InPlaceAttention):
    name = "varlen"

    def __init__(self, *, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(block_size=block_size, dtype=dtype)
        function = _find_function()
        if function is None:
            raise InvariantError(
                "the installed torch has no varlen_attn that reads a paged KV cache"
            )
        _activate_kernels()
        self._varlen_attn = function
        self._device = device

    @staticmethod
    def find_obstacle(
        layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Return why `varlen_attn` can't compute these layers on the device, or None if it can."""
        if (obstacle := find_common_obstacle(layers, dtype, device)) is not None:
            return obstacle
        for layer in layers:
            if layer.key_dim > _MAX_HEAD_DIM or layer.key_dim % 8:
                return (
                    f"head sizes may be multiples of 8 up to {_MAX_HEAD_DIM}, not {layer.key_dim}"
                )
        if _find_function() is None:
            return f"the varlen_attn of torch {torch.__version__} takes no block_table"
        if importlib.util.find_spec(_KERNEL_PACKAGE) is None:
            return f"it needs the FlashAttention-3 kernels: {_KERNEL_PACKAGE} is not installed"
        return None

    def _prepare_pages(self, layout: StepLayout) -> None:
        lengths = [0, *accumulate(layout.query_lens), *layout.seq_lens]
        uploaded = to_device(torch.tensor(lengths, dtype=torch.int32), self._device)
        num_starts = len(layout.query_lens) + 1
        self._query_starts = uploaded[:num_starts]  # [B + 1]
        self._seq_lens = uploaded[num_starts:].clone()  # [B]; copied, as kernels need it aligned
        self._block_tables = [group.block_tables.to(torch.int32) for group in layout.groups]
        self._max_query_len = max(layout.query_lens)
        self._max_seq_len = max(layout.seq_lens)

    def _attend_pages(
        self, layout: StepLayout, cache: LayerCache, queries: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        window = layout.groups[cache.group_index].window
        output: torch.Tensor = self._varlen_attn(
            queries,
            cache.keys,
            cache.values,
            self._query_starts,
            None,
            self._max_query_len,
            self._max_seq_len,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=queries.shape[1] != cache.keys.shape[2],
            seqused_k=self._seq_lens,
            block_table=self._block_tables[cache.group_index],
        )
        return output
