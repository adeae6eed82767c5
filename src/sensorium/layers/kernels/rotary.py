"""Applies rotary positions to queries and keys, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Heads per program: enough work for its threads, and not too many programs for long prompts.
_HEADS = 16


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
    HEADS: tl.constexpr,
):
    """Rotate some heads of one token. A number of the first half is paired with one of the second.

    The programs of the second axis take the heads of the query first, then those of the key.
    """
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    num_query_parts = tl.cdiv(num_query_heads, HEADS)
    i = tl.arange(0, PADDED)
    is_inside = i < HALF
    angles = token * cos_token + i
    cos_a = tl.load(cos + angles, mask=is_inside, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin + angles, mask=is_inside, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + angles + HALF, mask=is_inside, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + angles + HALF, mask=is_inside, other=0.0).to(tl.float32)[None, :]
    if tl.program_id(1) < num_query_parts:
        head = first + tl.arange(0, HEADS)
        num_heads = num_query_heads
        source = query + token * query_token + head * query_head
        target = new_query + (token * num_query_heads + head) * 2 * HALF
    else:
        head = first - num_query_parts * HEADS + tl.arange(0, HEADS)
        num_heads = num_key_heads
        source = key + token * key_token + head * key_head
        target = new_key + (token * num_key_heads + head) * 2 * HALF
    is_number = (head < num_heads)[:, None] & is_inside[None, :]
    source, target = source[:, None] + i[None, :], target[:, None] + i[None, :]
    a = tl.load(source, mask=is_number, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=is_number, other=0.0).to(tl.float32)
    kind = new_query.dtype.element_ty
    tl.store(target, (a * cos_a - b * sin_a).to(kind), mask=is_number)
    tl.store(target + HALF, (b * cos_b + a * sin_b).to(kind), mask=is_number)


def rotate(
    query: torch.Tensor,  # [N, H, D], dense in the last dimension
    key: torch.Tensor,  # [N, K, D]
    cos: torch.Tensor,  # [N, D]
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rotated query and key as contiguous tensors."""
    num_tokens, num_query_heads, head_dim = query.shape
    num_key_heads = key.shape[1]
    new_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    new_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    num_parts = triton.cdiv(num_query_heads, _HEADS) + triton.cdiv(num_key_heads, _HEADS)
    _rotate[(num_tokens, num_parts)](
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
        HEADS=_HEADS,
        num_warps=4,
    )
    return new_query, new_key
