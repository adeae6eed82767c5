"""Stores the new keys and values of a step, and computes attention for requests that decode.

Attention over one query token of each request takes two kernels. The first one divides the keys of
each request among several programs, so that a few long requests use the device as fully as many
short ones. The second one merges their results. Everything that changes from step to step is read
from tensors, and nothing is planned on the host. So every step of a batch size consists of the same
launches, which is what CUDA graphs need.

Keys and values beyond a request's length are never loaded, so it does not matter what an earlier
request left in its last block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Twice the number of multiprocessors of a large device, which is about 132.
_NUM_PROGRAMS = 264
_MAX_SPLITS = 64
_MIN_SIDE = 16  # the smallest side of a matrix product in Triton
_ENDLESS = 1 << 30  # a window that is longer than any request


# ---- storing


@triton.jit
def _store(
    new_keys, new_values, slots, keys, values, key_head, key_token, value_head, value_token,
    K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Copy the key and value of one token and head into the cache, unless its slot is below 0."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        i = tl.arange(0, PADDED)
        k = tl.load(new_keys + head * key_head + token * key_token + i, mask=i < D)
        tl.store(keys + (slot * K + head) * D + i, k, mask=i < D)
        v = tl.load(new_values + head * value_head + token * value_token + i, mask=i < DV)
        tl.store(values + (slot * K + head) * DV + i, v, mask=i < DV)


def store_new_tokens(
    keys: torch.Tensor,  # [blocks, block_size, K, D], contiguous
    values: torch.Tensor,
    slots: torch.Tensor,  # int64 [N]: block id * block size + offset; below 0: not stored
    new_keys: torch.Tensor,  # [1, K, N, D]
    new_values: torch.Tensor,
) -> None:
    """Copy the keys and values of new tokens into the KV cache."""
    if new_keys.stride(-1) != 1:
        new_keys = new_keys.contiguous()
    if new_values.stride(-1) != 1:
        new_values = new_values.contiguous()
    num_heads, num_tokens, head_dim = new_keys.shape[1:]
    value_dim = new_values.shape[3]
    _store[(num_tokens, num_heads)](
        *(new_keys, new_values, slots, keys, values),
        *(*new_keys.stride()[1:3], *new_values.stride()[1:3]),
        K=num_heads,
        D=head_dim,
        DV=value_dim,
        PADDED=triton.next_power_of_2(max(head_dim, value_dim)),
        num_warps=1,
    )


# ---- attention

# Triton compiles a kernel anew for numbers that are 1 or divisible by 16, and for addresses that
# are aligned. The arguments below change from step to step if prompts are computed next to
# decoding requests. They are not specialised, so that no kernel is compiled while requests wait.
_NUMBERS_THAT_CHANGE = ("table_row", "num_splits")
_ADDRESSES_THAT_CHANGE = ("tables", "seq_lens", "sums")


@triton.jit(
    do_not_specialize=_NUMBERS_THAT_CHANGE, do_not_specialize_on_alignment=_ADDRESSES_THAT_CHANGE
)
def _attend_part(
    query, keys, values, tables, seq_lens, parts, maxima, sums, scaling, window, query_row,
    query_head, key_slot, key_head, value_slot, value_head, table_row, num_heads, num_splits,
    PAGE: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention over one part of a request's keys; `_merge_parts` combines the parts."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    first = tl.maximum(seq_len - window, 0)
    size = tl.cdiv(tl.cdiv(seq_len - first, num_splits), TILE) * TILE
    start = first + split * size
    end = tl.minimum(start + size, seq_len)

    g, n = tl.arange(0, GROUP_PAD), tl.arange(0, TILE)
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    heads = kv_head * GROUP + g
    q = tl.load(
        query + row * query_row + heads[:, None] * query_head + d[None, :],
        mask=(g[:, None] < GROUP) & (d[None, :] < D),
        other=0.0,
    )
    maximum = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    sum_of_values = tl.zeros([GROUP_PAD, DV_PAD], tl.float32)
    for at in range(start, end, TILE):
        position = at + n
        is_seen = position < end
        page = tl.load(tables + row * table_row + position // PAGE, mask=is_seen, other=0)
        slot = page.to(tl.int64) * PAGE + position % PAGE
        k = tl.load(
            keys + slot[None, :] * key_slot + kv_head * key_head + d[:, None],
            mask=is_seen[None, :] & (d[:, None] < D),
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scaling
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp(scores - new_maximum[:, None])
        kept = tl.exp(maximum - new_maximum)
        v = tl.load(
            values + slot[:, None] * value_slot + kv_head * value_head + dv[None, :],
            mask=is_seen[:, None] & (dv[None, :] < DV),
            other=0.0,
        )
        sum_of_values = sum_of_values * kept[:, None]
        sum_of_values += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * kept + tl.sum(weights, 1)
        maximum = new_maximum

    place = (row * num_heads + heads) * num_splits + split
    is_head = g < GROUP
    tl.store(maxima + place, maximum, mask=is_head)
    tl.store(sums + place, total, mask=is_head)
    tl.store(
        parts + place[:, None] * DV + dv[None, :],
        sum_of_values,
        mask=is_head[:, None] & (dv[None, :] < DV),
    )


@triton.jit(
    do_not_specialize=_NUMBERS_THAT_CHANGE, do_not_specialize_on_alignment=_ADDRESSES_THAT_CHANGE
)
def _merge_parts(
    parts, maxima, sums, output, num_splits,
    SPLITS_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one query head's output; a part without any key has the weight 0."""
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS_PAD)
    dv = tl.arange(0, DV_PAD)
    is_part = split < num_splits
    maximum = tl.load(maxima + row * num_splits + split, mask=is_part, other=float("-inf"))
    total = tl.load(sums + row * num_splits + split, mask=is_part, other=0.0)
    weight = tl.exp(maximum - tl.max(maximum, 0))
    values = tl.load(
        parts + (row * num_splits + split[:, None]) * DV + dv[None, :],
        mask=is_part[:, None] & (dv[None, :] < DV),
        other=0.0,
    )
    result = tl.sum(values * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(output + row * DV + dv, result.to(output.dtype.element_ty), mask=dv < DV)


def attend_decoding(
    query: torch.Tensor,  # [B, H, D]
    keys: torch.Tensor,  # [blocks, block_size, K, D]
    values: torch.Tensor,  # [blocks, block_size, K, D of values]
    block_tables: torch.Tensor,  # int [B, blocks]
    seq_lens: torch.Tensor,  # int [B], at least 1 each
    *,
    scaling: float | None,  # None: one over the root of D
    window: int | None,
) -> torch.Tensor:
    """Return the attention output [B, H, D of values] for B requests with one query token each.

    Request i attends to its first `seq_lens[i]` tokens, or only to the last `window` of them. Its
    keys and values are in the cache blocks of `block_tables[i]`.
    """
    if query.stride(-1) != 1:
        query = query.contiguous()
    batch, num_heads, head_dim = query.shape
    block_size, num_kv_heads = keys.shape[1:3]
    value_dim = values.shape[3]
    num_splits = get_num_splits(batch * num_kv_heads)
    # Each part has a weighted sum of values, its largest score, and the sum of its weights.
    parts = query.new_empty(batch, num_heads, num_splits, value_dim, dtype=torch.float32)
    maxima, sums = query.new_empty(2, batch, num_heads, num_splits, dtype=torch.float32)
    output = query.new_empty(batch, num_heads, value_dim)
    is_float32 = query.dtype == torch.float32
    group = num_heads // num_kv_heads
    sizes = {"DV": value_dim, "DV_PAD": _pad(value_dim)}
    _attend_part[(batch, num_kv_heads, num_splits)](
        *(query, keys, values, block_tables, seq_lens, parts, maxima, sums),
        head_dim**-0.5 if scaling is None else scaling,
        _ENDLESS if window is None else window,
        *(*query.stride()[:2], *keys.stride()[1:3], *values.stride()[1:3]),
        block_tables.stride(0),
        num_heads,
        num_splits,
        PAGE=block_size,
        GROUP=group,
        GROUP_PAD=_pad(group),
        D=head_dim,
        D_PAD=_pad(head_dim),
        TILE=32 if is_float32 or max(head_dim, value_dim) > 128 else 64,
        PRECISION="ieee" if is_float32 else "tf32",
        num_warps=4,
        num_stages=2,
        **sizes,
    )
    _merge_parts[(batch * num_heads,)](
        *(parts, maxima, sums, output),
        num_splits,
        SPLITS_PAD=max(2, triton.next_power_of_2(num_splits)),
        num_warps=2,
        **sizes,
    )
    return output


def get_num_splits(num_pairs: int) -> int:
    """Return the number of parts into which each request's keys are divided, for each key head.

    `num_pairs` is the number of requests times the number of key heads. With fewer pairs there are
    more parts, so that the kernel uses the whole device.
    """
    return max(1, min(_MAX_SPLITS, -(-_NUM_PROGRAMS // num_pairs)))


def _pad(number: int) -> int:
    return max(_MIN_SIDE, triton.next_power_of_2(number))
