"""Computes cross-attention: the tokens of a request attend to all positions of its media.

Keys and values of the media lie in pages like those of tokens. A request gets all its pages at
once, and mostly they are consecutive. A CPU reads consecutive pages in place, and gathers others
first. A GPU uses the kernel for decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from sensorium.layers.attention.backend import LayerCache
from sensorium.layers.kernels import find_obstacle

# Called with the number of a row, its query and its keys.
Observe = Callable[[int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossRow:
    """The media positions of one request of a step, and the tokens that attend to them."""

    start: int  # the tokens [start, end) of the step
    end: int
    num_positions: int
    first_block: int | None  # None: its blocks are not consecutive
    block_ids: torch.Tensor  # int64 [blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossTables:
    """The places where one group of layers keeps the keys and values of media."""

    rows: Sequence[CrossRow]
    slot_mapping: torch.Tensor  # int64 [new positions], one request after the other
    block_tables: torch.Tensor  # int64 [N, blocks], with zeros behind those of a request
    num_positions: torch.Tensor  # int64 [N], of the request of each token


def attend_cross(
    cache: LayerCache,
    tables: CrossTables,
    query: torch.Tensor,  # [1, H, N, D]
    key: torch.Tensor,  # [1, K, new positions, D]; one unused row if there are none
    value: torch.Tensor,
    *,
    scaling: float | None,
    observed: Sequence[int],  # the rows for which `observe` is called
    observe: Observe,
) -> torch.Tensor:
    """Store new keys and values, and return cross-attention's output [1, N, H, D of values]."""
    num_new = len(tables.slot_mapping)
    if num_new:
        for pages, tensor in ((cache.keys, key), (cache.values, value)):
            new = tensor[0, :, :num_new].transpose(0, 1)
            pages.flatten(0, 1).index_copy_(0, tables.slot_mapping, new)
    for number in observed:
        row = tables.rows[number]
        observe(number, query[:, :, row.start : row.end], _get_positions(cache.keys, row))
    if find_obstacle(query.device) is None:
        return _attend_paged(cache, tables, query, scaling)
    return _attend_rows(cache, tables, query, scaling)


def _attend_paged(
    cache: LayerCache, tables: CrossTables, query: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attend with the kernel for decoding. Each token of the step is a row of its own."""
    from sensorium.layers.kernels.decoding import attend_decoding

    output = attend_decoding(
        query[0].transpose(0, 1),
        cache.keys,
        cache.values,
        tables.block_tables,
        tables.num_positions,
        scaling=scaling,
        window=None,
    )
    return output[None]


def _attend_rows(
    cache: LayerCache, tables: CrossTables, query: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    output = query.new_zeros(1, query.shape[2], query.shape[1], cache.values.shape[-1])
    for row in tables.rows:
        if not row.num_positions:  # a request without media
            continue
        keys, values = (_get_positions(pages, row) for pages in (cache.keys, cache.values))
        result = scaled_dot_product_attention(
            query[:, :, row.start : row.end],
            keys,
            values,
            scale=scaling,
            enable_gqa=keys.shape[1] != query.shape[1],
        )
        output[:, row.start : row.end] = result.transpose(1, 2)
    return output


def _get_positions(pages: torch.Tensor, row: CrossRow) -> torch.Tensor:
    """Return the keys or values [1, K, positions, D] of a request."""
    if row.first_block is None:
        blocks = pages.index_select(0, row.block_ids)
    else:
        blocks = pages[row.first_block : row.first_block + len(row.block_ids)]
    return blocks.flatten(0, 1)[: row.num_positions].transpose(0, 1)[None]
