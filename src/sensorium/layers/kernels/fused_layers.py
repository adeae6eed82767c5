"""Computes parts of a model's layers in one kernel each: gates, RMS norms and rotary positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # numbers of a row per program of the gate
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
# Heads per program: enough work for its threads, and not too many programs for long prompts.
_HEADS = 16


def _get_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a matrix [rows, columns] with dense rows, copied only if necessary."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


# ---- gates: the activation of one half of each row, multiplied by the other half


@triton.jit
def _multiply(both, output, row_stride, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < width
    gate = tl.load(both + row * row_stride + i, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * row_stride + width + i, mask=is_inside, other=0.0)
    if KIND == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif KIND == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-2.0 * inner))  # 0.5 (1 + tanh x) = sigmoid(2 x)
    kind = output.dtype.element_ty
    product = active.to(kind).to(tl.float32) * up.to(tl.float32)
    tl.store(output + row * width + i, product.to(kind), mask=is_inside)


def activate_and_multiply(both: torch.Tensor, *, kind: str) -> torch.Tensor:
    """Return the activation of each row's first half, times its second half: [..., width]."""
    rows = _get_rows(both)
    width = rows.shape[1] // 2
    output = torch.empty(len(rows), width, dtype=both.dtype, device=both.device)
    _multiply[(len(rows), triton.cdiv(width, _BLOCK))](
        rows, output, rows.stride(0), width, KIND=kind, BLOCK=_BLOCK, num_warps=4
    )
    return output.view(*both.shape[:-1], width)


# ---- RMS normalisation of rows, or of a sum of two tensors


@triton.jit
def _normalize(
    x, added, weight, total, output, row_stride, added_row_stride, num_columns, eps, offset,
    ADDS: tl.constexpr, ROUNDS_FIRST: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Compute the RMS norm of one row, and with `ADDS` first add another row to it."""
    kind = output.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    is_inside = i < num_columns
    values = tl.load(x + row * row_stride + i, mask=is_inside, other=0.0).to(tl.float32)
    if ADDS:
        more = tl.load(added + row * added_row_stride + i, mask=is_inside, other=0.0)
        values = (values + more.to(tl.float32)).to(kind)
        tl.store(total + row * num_columns + i, values, mask=is_inside)
        values = values.to(tl.float32)
    mean = tl.sum(values * values, 0) / num_columns
    values = values * (1.0 / tl.sqrt(mean + eps))
    scale = tl.load(weight + i, mask=is_inside, other=0.0).to(tl.float32) + offset
    if ROUNDS_FIRST:
        values = values.to(kind).to(tl.float32)
    tl.store(output + row * num_columns + i, (values * scale).to(kind), mask=is_inside)


def normalize(
    x: torch.Tensor,  # [..., columns]
    weight: torch.Tensor,  # [columns]
    *,
    eps: float,
    offset: float = 0.0,
    rounds_first: bool = True,  # round the quotient to the type of x before it is multiplied
) -> torch.Tensor:
    """Return the RMS norm of each row: x / sqrt(mean of x² + eps), times (weight + offset)."""
    return add_and_normalize(x, None, weight, eps=eps, offset=offset, rounds_first=rounds_first)[1]


def add_and_normalize(
    x: torch.Tensor,  # [..., columns]
    added: torch.Tensor | None,  # of the same shape; None: nothing is added
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    rounds_first: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + added, or x if `added` is None, and the RMS norm of each row of this sum."""
    rows = _get_rows(x)
    added_rows = rows if added is None else _get_rows(added)
    output = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    total = rows if added is None else torch.empty_like(output)
    num_columns = rows.shape[1]
    padded = triton.next_power_of_2(num_columns)
    _normalize[(len(rows),)](
        *(rows, added_rows, weight, total, output),
        *(rows.stride(0), added_rows.stride(0), num_columns, eps, offset),
        ADDS=added is not None,
        ROUNDS_FIRST=rounds_first,
        PADDED=padded,
        num_warps=4 if padded <= 4096 else 8,
    )
    return total.view(x.shape), output.view(x.shape)


# ---- rotary positions of queries and keys


@triton.jit
def _rotate(
    query, key, cos, sin, new_query, new_key, query_token, query_head, key_token, key_head,
    cos_token, num_query_heads, num_key_heads,
    HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Apply rotary positions to some heads of one token.

    Each number of the first half of a head is rotated with its counterpart in the second half.
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
    # The programs of the second axis take the heads of the query first, then those of the key.
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
    cos: torch.Tensor,  # [N, D], of the angles of each token
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the query and the key with rotary positions applied, as new contiguous tensors."""
    num_tokens, num_query_heads, head_dim = query.shape
    num_key_heads = key.shape[1]
    new_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    new_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    num_parts = triton.cdiv(num_query_heads, _HEADS) + triton.cdiv(num_key_heads, _HEADS)
    _rotate[(num_tokens, num_parts)](
        *(query, key, cos, sin, new_query, new_key),
        *(*query.stride()[:2], *key.stride()[:2], cos.stride(0), num_query_heads, num_key_heads),
        HALF=head_dim // 2,
        PADDED=triton.next_power_of_2(head_dim // 2),
        HEADS=_HEADS,
        num_warps=4,
    )
    return new_query, new_key
