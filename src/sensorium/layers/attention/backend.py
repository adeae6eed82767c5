"""What every paged attention implementation offers, and what it is told about a step.

Shapes: N tokens of the step, B requests, H query heads, K key/value heads, D head size, S key
positions. Requests with one query token (decoding) come first; the tokens of a request are
consecutive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

NO_SLOT = -1  # of a token that is padding: kernels in graphs store nothing for it


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTables:
    """Where one group of layers keeps the step's keys and values. `is_causal`: spans that other
    groups see in both directions are like text to this one.
    """

    window: int | None
    slot_mapping: torch.Tensor  # int64 [N]: block_id * block_size + offset, for each new token
    block_tables: torch.Tensor  # int64 [B, blocks], padded with the null block
    is_causal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """One step's requests. `attend_until[i]`: token i sees the positions before it; beyond its
    own inside a span that is attended in both directions. `None`: causal everywhere.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]  # positions known after the step
    groups: tuple[GroupTables, ...]
    attend_until: torch.Tensor | None  # int64 [N]

    @property
    def num_decodes(self) -> int:
        for index, length in enumerate(self.query_lens):
            if length > 1:
                return index
        return len(self.query_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """One layer's paged keys and values, and the group whose tables address them."""

    keys: torch.Tensor  # [blocks, block_size, K, D]
    values: torch.Tensor  # [blocks, block_size, K, D of values]
    group_index: int
    is_shared: bool  # the new keys and values are there already; those of an earlier layer may be


def store_new_tokens(
    cache: LayerCache, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Put keys and values [1, K, N, D] into their slots."""
    cache.keys.flatten(0, 1).index_copy_(0, slot_mapping, key[0].transpose(0, 1))
    cache.values.flatten(0, 1).index_copy_(0, slot_mapping, value[0].transpose(0, 1))


class PagedAttention(Protocol):
    """Attention over paged keys and values for one step at a time."""

    @property
    def name(self) -> str:
        """As in the option `attention_backend`."""

    def prepare(self, layout: StepLayout) -> None:
        """Learn the next step; called once before its layers."""

    def attend(
        self,
        cache: LayerCache,
        query: torch.Tensor,  # [1, H, N, D]
        key: torch.Tensor,  # [1, K, N, D]
        value: torch.Tensor,
        *,
        scaling: float | None,
    ) -> torch.Tensor:
        """Store the new keys and values unless they are shared; the attention output [1, N, H, D
        of values].
        """
