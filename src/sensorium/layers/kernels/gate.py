"""Multiplies the activation of one half of each row by the other half, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
KINDS = ("silu", "gelu", "gelu_tanh")


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
    """Return the activation of the first half of each row, times the second half.

    The shape [..., 2 × width] becomes [..., width].
    """
    rows = both.reshape(-1, both.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    width = rows.shape[1] // 2
    output = torch.empty(len(rows), width, dtype=both.dtype, device=both.device)
    _multiply[(len(rows), triton.cdiv(width, _BLOCK))](
        rows, output, rows.stride(0), width, KIND=kind, BLOCK=_BLOCK, num_warps=4
    )
    return output.view(*both.shape[:-1], width)
