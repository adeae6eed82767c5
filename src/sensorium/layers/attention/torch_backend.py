"""Computes paged attention with torch's own kernels, on keys and values gathered from blocks.

Decoding requests with lengths between the same two powers of two form a bucket. Each bucket is
padded and takes one call, so that a long request doesn't slow down the short ones. The query heads
of one key head are folded into the query length, which is about a third faster than repeating the
keys. Masks and block lists are made once per step and group, for all layers of the group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sensorium.layers.attention.backend import GroupTables, LayerCache, StepLayout, store_new_tokens
from sensorium.types.errors import InvariantError
from sensorium.utils.arrays import to_device

# In numbers. A bias with rows that start at other multiples would be copied by every layer.
_BIAS_ALIGNMENT = 16


_lock = threading.Lock()
_found: list[bool] = []  # the setting that was found, once for each step that is running


@contextmanager
def use_ready_kernels() -> Iterator[None]:
    """Keep `scaled_dot_product_attention` from using cuDNN kernels, inside a `with`.

    Those are compiled for every new pair of lengths, which takes some 50 ms, and new lengths come
    with almost every request. The setting belongs to the process, where several engines may be in a
    step at once. So the last engine restores the setting that the first one found.
    """
    with _lock:
        was_enabled = _found[0] if _found else torch.backends.cuda.cudnn_sdp_enabled()
        _found.append(was_enabled)
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _lock:
            _found.pop()
            if not _found:
                torch.backends.cuda.enable_cudnn_sdp(was_enabled)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeBucket:
    rows: slice | torch.Tensor  # indices of its requests in the step
    block_ids: torch.Tensor  # [b * blocks]
    mask: torch.Tensor  # float [b, 1, 1, S], 0 or -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefill:
    tokens: slice  # the request's tokens in the step
    block_ids: torch.Tensor | None  # None: all its keys are new, nothing to gather
    num_keys: int
    mask: torch.Tensor | None  # [query, S], bool, or on a GPU 0 and -inf; None: plain causal


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupPlan:
    slot_mapping: torch.Tensor
    num_decodes: int
    decodes: Any  # the result of `_plan_decodes`
    prefills: tuple[_Prefill, ...]


class TorchPagedAttention:
    name = "torch"

    def __init__(self, *, block_size: int, dtype: torch.dtype) -> None:
        self._block_size = block_size
        self._dtype = dtype
        self._plans: list[_GroupPlan] = []

    def prepare(self, layout: StepLayout) -> None:
        self._plans = [self._plan_group(layout, group) for group in layout.groups]

    def attend(
        self,
        cache: LayerCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
    ) -> torch.Tensor:
        plan = self._plans[cache.group_index]
        if not cache.is_shared:
            self._store(cache, plan.slot_mapping, key, value)
        # With a single request there is nothing to put together, and nothing to copy.
        if not plan.num_decodes and len(plan.prefills) == 1:
            return _prefill(cache, query, key, value, plan.prefills[0], scaling)
        num_heads, num_tokens = query.shape[1], query.shape[2]
        output = query.new_empty(num_tokens, num_heads, cache.values.shape[-1])
        if plan.num_decodes:
            queries = query[0].transpose(0, 1)[: plan.num_decodes]
            self._attend_decoding(cache, queries, plan.decodes, scaling, output[: plan.num_decodes])
        for prefill in plan.prefills:
            q, k, v = (tensor[:, :, prefill.tokens] for tensor in (query, key, value))
            output[prefill.tokens] = _prefill(cache, q, k, v, prefill, scaling)[0]
        return output[None]

    def _plan_group(self, layout: StepLayout, group: GroupTables) -> _GroupPlan:
        num_decodes = layout.num_decodes
        prefills = []
        start = num_decodes
        for row in range(num_decodes, len(layout.query_lens)):
            tokens = slice(start, start + layout.query_lens[row])
            prefills.append(self._plan_prefill(layout, group, row, tokens))
            start = tokens.stop
        return _GroupPlan(
            slot_mapping=group.slot_mapping,
            num_decodes=num_decodes,
            decodes=self._plan_decodes(group, layout.seq_lens[:num_decodes]),
            prefills=tuple(prefills),
        )

    # ---- requests that decode: a backend that inherits from this one may replace this part

    def _store(
        self, cache: LayerCache, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        store_new_tokens(cache, slots, key, value)

    def _attend_decoding(
        self,
        cache: LayerCache,
        queries: torch.Tensor,  # [b, H, D]
        decodes: Any,
        scaling: float | None,
        output: torch.Tensor,  # [b, H, D of values], filled here
    ) -> None:
        for bucket in decodes:
            output[bucket.rows] = _decode(cache, queries[bucket.rows], bucket, scaling)

    def _plan_decodes(self, group: GroupTables, seq_lens: tuple[int, ...]) -> Any:
        if not seq_lens:
            return ()
        firsts = [self._first_block(group, seq_len - 1) for seq_len in seq_lens]
        widths = [self._last_block(end) - a for end, a in zip(seq_lens, firsts, strict=True)]
        rows_by_width: dict[int, list[int]] = {}
        for row, width in enumerate(widths):
            rows_by_width.setdefault(width.bit_length(), []).append(row)
        buckets = list(rows_by_width.values())
        order = [row for rows in buckets for row in rows]
        facts = [order, [firsts[row] for row in order], [seq_lens[row] for row in order]]
        uploaded = to_device(torch.tensor(facts, dtype=torch.long), group.block_tables.device)
        return tuple(
            self._plan_bucket(
                group,
                *part,
                num_blocks=max(widths[row] for row in rows),
                is_whole=len(buckets) == 1,
            )
            for rows, part in zip(buckets, uploaded.split(list(map(len, buckets)), 1), strict=True)
        )

    def _plan_bucket(
        self,
        group: GroupTables,
        rows: torch.Tensor,  # [b]
        first_blocks: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        num_blocks: int,
        is_whole: bool,
    ) -> _DecodeBucket:
        device = group.block_tables.device
        first = first_blocks[:, None]
        columns = first + torch.arange(num_blocks, device=device)
        columns.clamp_(max=group.block_tables.shape[1] - 1)
        # [b, S]: the position of each gathered key in its request
        offsets = torch.arange(num_blocks * self._block_size, device=device)
        positions = first * self._block_size + offsets
        lengths = seq_lens[:, None]
        is_seen = positions < lengths
        if group.window is not None:
            is_seen &= positions >= lengths - group.window
        mask = torch.zeros(is_seen.shape, dtype=self._dtype, device=device)
        mask.masked_fill_(~is_seen, float("-inf"))
        return _DecodeBucket(
            rows=slice(0, len(rows)) if is_whole else rows,
            block_ids=group.block_tables[rows[:, None], columns].flatten(),
            mask=mask[:, None, None],
        )

    def _plan_prefill(
        self, layout: StepLayout, group: GroupTables, row: int, tokens: slice
    ) -> _Prefill:
        seq_len = layout.seq_lens[row]
        first_query = seq_len - layout.query_lens[row]
        first_block = self._first_block(group, first_query)
        first_key = first_block * self._block_size
        is_whole = first_query == 0
        is_plain = layout.attend_until is None or group.is_causal
        is_causal = is_plain and (group.window is None or seq_len <= group.window)
        block_ids = mask = None
        if not is_whole:
            block_ids = group.block_tables[row, first_block : self._last_block(seq_len)]
        if not (is_whole and is_causal):
            mask = self._make_mask(layout, group, tokens, first_key, seq_len)
        num_keys = seq_len - first_key
        return _Prefill(tokens=tokens, block_ids=block_ids, num_keys=num_keys, mask=mask)

    def _make_mask(
        self, layout: StepLayout, group: GroupTables, tokens: slice, first_key: int, seq_len: int
    ) -> torch.Tensor:
        """Return a mask [queries, keys] of the keys that each new token of a request attends to.

        The queries are the request's last tokens, up to `seq_len`; the keys begin at `first_key`.
        On a CPU the mask is True where a token attends. On a GPU it is 0 there, and -inf elsewhere.
        """
        device = group.block_tables.device
        first_query = seq_len - (tokens.stop - tokens.start)
        queries = torch.arange(first_query, seq_len, device=device)[:, None]
        keys = torch.arange(first_key, seq_len, device=device)
        until = queries + 1
        if layout.attend_until is not None and not group.is_causal:
            until = layout.attend_until[tokens, None]
        mask = keys < until
        if group.window is not None:
            mask &= keys > queries - group.window
        return mask if device.type == "cpu" else self._make_bias(mask)

    def _make_bias(self, mask: torch.Tensor) -> torch.Tensor:
        """Convert a boolean mask to the additive form that kernels for GPUs need: 0 or -inf.

        Done here, the conversion takes place once per step and not once per layer.
        """
        num_queries, num_keys = mask.shape
        width = -(-num_keys // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
        bias = torch.zeros(num_queries, width, dtype=self._dtype, device=mask.device)[:, :num_keys]
        return bias.masked_fill_(~mask, float("-inf"))

    def _first_block(self, group: GroupTables, position: int) -> int:
        """Return the index of the first cache block that the token at `position` attends to."""
        if group.window is None:
            return 0
        return max(0, position - group.window + 1) // self._block_size

    def _last_block(self, seq_len: int) -> int:
        return -(-seq_len // self._block_size)


class InPlaceAttention(TorchPagedAttention):
    """A base class for backends with kernels that read the pages of the KV cache in place.

    If media tokens of a step attend in both directions, the torch backend computes that step.
    """

    _layout: StepLayout | None = None

    def prepare(self, layout: StepLayout) -> None:
        self._layout = layout
        if layout.attend_until is None:
            self._prepare_pages(layout)
        else:
            super().prepare(layout)

    def attend(
        self,
        cache: LayerCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
    ) -> torch.Tensor:
        if self._layout is None:
            raise InvariantError("attend() was called before prepare(), which must begin each step")
        if self._layout.attend_until is not None:
            return super().attend(cache, query, key, value, scaling=scaling)
        if not cache.is_shared:
            slots = self._layout.groups[cache.group_index].slot_mapping
            store_new_tokens(cache, slots, key, value)
        queries = query[0].transpose(0, 1).contiguous()
        return self._attend_pages(self._layout, cache, queries, scaling)[None]

    def _prepare_pages(self, layout: StepLayout) -> None:
        """Prepare the kernels for a step in which all attention is causal."""
        raise NotImplementedError

    def _attend_pages(
        self, layout: StepLayout, cache: LayerCache, queries: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Return the output [N, H, D] of one layer; its keys and values are stored already."""
        raise NotImplementedError


def _gather(blocks: torch.Tensor, block_ids: torch.Tensor, batch: int) -> torch.Tensor:
    """Copy blocks of `batch` requests, equally many each, into a dense tensor [batch, K, S, D]."""
    gathered = blocks.index_select(0, block_ids)
    return gathered.view(batch, -1, *blocks.shape[2:]).transpose(1, 2)


def _prefill(
    cache: LayerCache,
    query: torch.Tensor,  # [1, H, n, D], of one request
    key: torch.Tensor,
    value: torch.Tensor,
    prefill: _Prefill,
    scaling: float | None,
) -> torch.Tensor:
    """Return the output [1, n, H, D of values] of one request that computes n prompt tokens.

    Keys of earlier steps are gathered from the cache.
    """
    if prefill.block_ids is not None:
        key = _gather(cache.keys, prefill.block_ids, 1)[:, :, : prefill.num_keys]
        value = _gather(cache.values, prefill.block_ids, 1)[:, :, : prefill.num_keys]
    group = query.shape[1] // key.shape[1]
    if group > 1 and prefill.mask is not None and query.is_cuda:
        # The kernel that takes a mask can't group heads. With grouped heads, torch would fall back
        # to a kernel that stores all scores.
        key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
        group = 1
    result = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=prefill.mask,
        is_causal=prefill.mask is None,
        scale=scaling,
        enable_gqa=group > 1,
    )
    return result.transpose(1, 2)


def _decode(
    cache: LayerCache, queries: torch.Tensor, bucket: _DecodeBucket, scaling: float | None
) -> torch.Tensor:
    """Return the output [b, H, D of values] for b requests with one query token each."""
    batch, num_heads, _ = queries.shape
    num_kv_heads = cache.keys.shape[2]
    result = scaled_dot_product_attention(
        queries.reshape(batch, num_kv_heads, num_heads // num_kv_heads, -1),
        _gather(cache.keys, bucket.block_ids, batch),
        _gather(cache.values, bucket.block_ids, batch),
        attn_mask=bucket.mask,
        scale=scaling,
    )
    return result.reshape(batch, num_heads, -1)
