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
    """The places in the cache at which one group of layers keeps the keys and values of a step."""

    window: int | None
    slot_mapping: torch.Tensor  # int64 [N]: block_id * block_size + offset, for each new token
    block_tables: torch.Tensor  # int64 [B, blocks], padded with the null block
    is_causal: bool = False  # True: ignore `StepLayout.attend_until`, attend to spans like text


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """The requests of a step, and the tokens that each token attends to."""

    query_lens: tuple[int, ...]  # per request: tokens that the step computes
    seq_lens: tuple[int, ...]  # per request: tokens computed after the step
    groups: tuple[GroupTables, ...]
    # int64 [N]: each token attends to the positions before this one. Inside a span with attention
    # in both directions, it is the end of the span. None: attention is causal everywhere.
    attend_until: torch.Tensor | None

    @property
    def num_decodes(self) -> int:
        for index, length in enumerate(self.query_lens):
            if length > 1:
                return index
        return len(self.query_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """The paged keys and values of one layer, and the group with the tables that address them."""

    keys: torch.Tensor  # [blocks, block_size, K, D]
    values: torch.Tensor  # [blocks, block_size, K, D of values]
    group_index: int
    # The new keys and values are in the cache already: an earlier layer or a graph has stored them.
    is_shared: bool


def store_new_tokens(
    cache: LayerCache, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Store keys and values [1, K, N, D] in their slots."""
    cache.keys.flatten(0, 1).index_copy_(0, slot_mapping, key[0].transpose(0, 1))
    cache.values.flatten(0, 1).index_copy_(0, slot_mapping, value[0].transpose(0, 1))


def find_common_obstacle(
    layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why no CUDA kernel for half precision can compute these layers, or `None`."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"its kernels take float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    for layer in layers:
        if layer.key_dim != layer.value_dim:
            return f"keys of size {layer.key_dim} with values of size {layer.value_dim}"
    return None


class PagedAttention(Protocol):
    """A backend that computes attention over paged keys and values, one step at a time."""

    @property
    def name(self) -> str:
        """Return the backend's name in the option `attention_backend`."""

    def prepare(self, layout: StepLayout) -> None:
        """Prepare for the next step. This is called once, before its layers attend."""

    def attend(
        self,
        cache: LayerCache,
        query: torch.Tensor,  # [1, H, N, D]
        key: torch.Tensor,  # [1, K, N, D]
        value: torch.Tensor,
        *,
        scaling: float | None,
    ) -> torch.Tensor:
        """Return the attention output [1, N, H, D of values] of one layer.

        The new keys and values are stored first, unless `cache.is_shared`.
        """
