"""The gather of torch computes the steps that every backend must; `tests/gpu` asks the others."""

from __future__ import annotations

import pytest
import torch

from .paged_step import Shape
from .steps import CHECKS, Setting

SHAPES = {
    "MHA": Shape(num_heads=2, num_kv_heads=2, key_dim=16, value_dim=16, block_size=16),
    "GQA": Shape(num_heads=6, num_kv_heads=2, key_dim=16, value_dim=16, block_size=16),
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_equal_dense_attention(name: str, shape: Shape, dtype: torch.dtype) -> None:
    CHECKS[name](Setting(dtype=dtype), shape)
