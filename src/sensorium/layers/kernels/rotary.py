"""Rotary positions of queries and keys, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate(
    query,
    key,
    cos,
    sin,
    new_query,
    new_key,
    query_token,
    query_head,
    key_token,
    key_head,
    cos_token,
    num_query_heads,
    num_key_heads,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Rotate one head of one token: the first numbers of it are pairs of halves."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, PADDED)
    is_inside = i < HALF
    angles = token * cos_token + i
    cos_a = tl.load(cos + angles, mask=is_inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + angles, mask=is_inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angles + HALF, mask=is_inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + angles + HALF, mask=is_inside, other=0.0).to(tl.float32)
    if head < num_query_heads:
        source = query + token * query_token + head * query_head
        target = new_query + (token * num_query_heads + head) * 2 * HALF
    else:
        source = key + token * key_token + (head - num_query_heads) * key_head
        target = new_key + (token * num_key_heads + head - num_query_heads) * 2 * HALF
    a = tl.load(source + i, mask=is_inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + i, mask=is_inside, other=0.0).to(tl.float32)
    kind = new_query.dtype.element_ty
    tl.store(target + i, (a * cos_a - b * sin_a).to(kind), mask=is_inside)
    tl.store(target + HALF + i, (b * cos_b + a * sin_b).to(kind), mask=is_inside)


def rotate(
    query: torch.Tensor,  # [N, H, D], dense in the last dimension
    key: torch.Tensor,  # [N, K, D]
    cos: torch.Tensor,  # [N, D]
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both, rotated; contiguous."""
    num_tokens, num_query_heads, head_dim = query.shape
    num_key_heads = key.shape[1]
    new_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    new_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    _rotate[(num_tokens, num_query_heads + num_key_heads)](
        query,
        key,
        cos,
        sin,
        new_query,
        new_key,
        *query.stride()[:2],
        *key.stride()[:2],
        cos.stride(0),
        num_query_heads,
        num_key_heads,
        HALF=head_dim // 2,
        PADDED=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )
    return new_query, new_key
