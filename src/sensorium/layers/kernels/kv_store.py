"""Stores the new keys and values of a step in their slots, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _store(
    new_keys,
    new_values,
    slots,
    keys,
    values,
    key_head,
    key_token,
    value_head,
    value_token,
    K: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Store the key and value of one token and one head, unless its slot is below 0."""
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
    slots: torch.Tensor,  # int64 [N]; below 0: not stored
    new_keys: torch.Tensor,  # [1, K, N, D]
    new_values: torch.Tensor,
) -> None:
    """Store new keys and values in their slots."""
    if new_keys.stride(-1) != 1:
        new_keys = new_keys.contiguous()
    if new_values.stride(-1) != 1:
        new_values = new_values.contiguous()
    num_heads, num_tokens, head_dim = new_keys.shape[1:]
    value_dim = new_values.shape[3]
    _store[(num_tokens, num_heads)](
        new_keys,
        new_values,
        slots,
        keys,
        values,
        *new_keys.stride()[1:3],
        *new_values.stride()[1:3],
        K=num_heads,
        D=head_dim,
        DV=value_dim,
        PADDED=triton.next_power_of_2(max(head_dim, value_dim)),
        num_warps=1,
    )
