"""Defines the interface of paged attention backends, and the description of a step that they get.

Shapes: N tokens of the step, B requests, H query heads, K key/value heads, D head size, S key
positions. Requests with one query token (decoding) come first; the tokens of a request are
consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sensorium.layers.kv_layout import LayerSpec

NO_SLOT = -1  # the slot of a padding token: kernels in graphs store nothing for it


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTables:
    """The places in the KV cache at which one group keeps the keys and values of a step."""

    window: int | None
    slot_mapping: torch.Tensor  # int64 [N]: block_id * block_size + offset, for each new token
    block_tables: torch.Tensor  # int64 [B, blocks], padded with the null block
    is_causal: bool = False  # True: ignore `StepLayout.attend_until`, attend to spans like text


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """The requests of a step, and the range of tokens that each new token attends to."""

    query_lens: tuple[int, ...]  # per request: tokens that the step computes
    seq_lens: tuple[int, ...]  # per request: tokens computed after the step
    groups: tuple[GroupTables, ...]
    # int64 [N]: the exclusive end of the positions that each token attends to. Inside a span with
    # attention in both directions, it is the span's end. None: attention is causal everywhere.
    attend_until: torch.Tensor | None

    @property
    def num_decodes(self) -> int:
        for index, length in enumerate(self.query_lens):
            if length > 1:
                return index
        return len(self.query_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """The paged keys and values of one layer, and the index of the layer's group."""

    keys: torch.Tensor  # [blocks, block_size, K, D]
    values: torch.Tensor  # [blocks, block_size, K, D of values]
    group_index: int  # in `StepLayout.groups`, which have the block tables for these pages
    # The new keys and values are in the cache already: an earlier layer or a graph has stored them.
    is_shared: bool


def store_new_tokens(
    cache: LayerCache, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Copy the keys and values [1, K, N, D] of N new tokens into the KV cache of a layer."""
    cache.keys.flatten(0, 1).index_copy_(0, slot_mapping, key[0].transpose(0, 1))
    cache.values.flatten(0, 1).index_copy_(0, slot_mapping, value[0].transpose(0, 1))


def find_common_obstacle(
    layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why half-precision CUDA kernels can't compute these layers, or None if they can.

    This checks what several backends have in common: the device, the dtype, and equal sizes of keys
    and values.
    """
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"its kernels take float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    for layer in layers:
        if layer.key_dim != layer.value_dim:
            return (
                "its kernels need keys and values of one size, "
                f"not keys of size {layer.key_dim} with values of size {layer.value_dim}"
            )
    return None


class PagedAttention(Protocol):
    """A backend that computes attention over paged keys and values, one step at a time."""

    @property
    def name(self) -> str:
        """Return the backend's name, as users write it in the option `attention_backend`."""

    def prepare(self, layout: StepLayout) -> None:
        """Prepare for the next step, once before its layers call `attend`."""

    def attend(
        self,
        cache: LayerCache,
        query: torch.Tensor,  # [1, H, N, D]
        key: torch.Tensor,  # [1, K, N, D]
        value: torch.Tensor,
        *,
        scaling: float | None,  # of the attention scores; None: one over the root of D
    ) -> torch.Tensor:
        """Return the attention output [1, N, H, D of values] of one layer in the prepared step.

        The keys and values are first stored in the cache, unless `cache.is_shared`.
        """
