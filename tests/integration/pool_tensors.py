"""Makes tensors of every kind that a processor returns, equal in the test and in the worker."""

from __future__ import annotations

import torch


def make_tensors(num_floats: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    pixels = torch.randn(num_floats, generator=generator)
    return {
        "pixel_values": pixels,
        "halves": pixels[:7].to(torch.bfloat16),
        "transposed": torch.arange(6, dtype=torch.int64).reshape(2, 3).T,
        "mask": torch.tensor([[True, False, True]]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3, dtype=torch.int32),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
