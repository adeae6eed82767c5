"""RMS normalisation of rows, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _normalize(
    x,
    weight,
    output,
    row_stride,
    num_columns,
    eps,
    offset,
    HAS_WEIGHT: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Normalise one row. `ROUNDS_FIRST`: it is rounded before it is multiplied by the weight."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    is_inside = i < num_columns
    values = tl.load(x + row * row_stride + i, mask=is_inside, other=0.0).to(tl.float32)
    mean = tl.sum(values * values, 0) / num_columns
    values = values * (1.0 / tl.sqrt(mean + eps))
    if HAS_WEIGHT:
        scale = tl.load(weight + i, mask=is_inside, other=0.0).to(tl.float32) + offset
        if ROUNDS_FIRST:
            values = values.to(output.dtype.element_ty).to(tl.float32)
        values = values * scale
    tl.store(output + row * num_columns + i, values.to(output.dtype.element_ty), mask=is_inside)


def normalize(
    x: torch.Tensor,  # [..., columns]
    weight: torch.Tensor | None,  # [columns]
    *,
    eps: float,
    offset: float = 0.0,
    rounds_first: bool = True,
) -> torch.Tensor:
    """Return x / sqrt(mean of x² + eps), times weight + offset."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    output = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    num_columns = rows.shape[1]
    padded = triton.next_power_of_2(num_columns)
    _normalize[(len(rows),)](
        rows,
        weight,
        output,
        rows.stride(0),
        num_columns,
        eps,
        offset,
        HAS_WEIGHT=weight is not None,
        ROUNDS_FIRST=rounds_first,
        PADDED=padded,
        num_warps=4 if padded <= 4096 else 8,
    )
    return output.view(x.shape)
