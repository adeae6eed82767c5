"""Computes the RMS normalisation of rows, or of a sum of two tensors, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _normalize(
    x,
    added,
    weight,
    total,
    output,
    row_stride,
    added_row_stride,
    num_columns,
    eps,
    offset,
    ADDS: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Normalise one row. With `ROUNDS_FIRST` it is rounded before the weight is applied."""
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
    rounds_first: bool = True,
) -> torch.Tensor:
    """Return x / sqrt(mean of x² + eps), times weight + offset."""
    return _run(x, None, weight, eps, offset, rounds_first)[1]


def add_and_normalize(
    x: torch.Tensor,  # [..., columns]
    added: torch.Tensor,  # of the same shape
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    rounds_first: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + added, and the normalisation of this sum."""
    return _run(x, added, weight, eps, offset, rounds_first)


def _run(
    x: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    rounds_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _get_rows(x)
    added_rows = rows if added is None else _get_rows(added)
    output = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    total = rows if added is None else torch.empty_like(output)
    num_columns = rows.shape[1]
    padded = triton.next_power_of_2(num_columns)
    _normalize[(len(rows),)](
        *(rows, added_rows, weight, total, output),
        rows.stride(0),
        added_rows.stride(0),
        num_columns,
        eps,
        offset,
        ADDS=added is not None,
        ROUNDS_FIRST=rounds_first,
        PADDED=padded,
        num_warps=4 if padded <= 4096 else 8,
    )
    return total.view(x.shape), output.view(x.shape)


def _get_rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
