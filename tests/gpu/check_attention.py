"""Every backend against dense float64 attention, on the device."""

from __future__ import annotations

from functools import cache

import torch

from sensorium.layers.attention.backend import PagedAttention
from sensorium.layers.attention.selection import choose_attention
from sensorium.layers.kv_layout import LayerSpec
from sensorium.types.errors import ModelError
from tests.unit.layers.paged_step import Shape
from tests.unit.layers.steps import CHECKS, Setting

from .setting import get_device, raise_unavailable, use_exact_float32

HEADS = {"MHA": (2, 2), "GQA": (14, 2), "MQA": (4, 1)}


@cache
def _get_backend(name: str, dtype: torch.dtype, head_dim: int, block_size: int) -> PagedAttention:
    layers = [
        LayerSpec(
            layer_index=index,
            num_kv_heads=2,
            key_dim=head_dim,
            value_dim=head_dim,
            window=window,
            source=index,
        )
        for index, window in enumerate((None, 5))
    ]
    try:
        return choose_attention(
            name,
            layers=layers,
            block_size=block_size,
            dtype=dtype,
            device=torch.device(get_device()),
        )
    except ModelError as error:
        raise_unavailable(error)


def check_backend(name: str, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """All steps of `tests.unit.layers.steps`; every failure is named, not only the first."""
    use_exact_float32()
    backend = _get_backend(name, dtype, head_dim, block_size)
    setting = Setting(dtype=dtype, device=get_device(), backend=backend)
    failures = []
    for heads, (num_heads, num_kv_heads) in HEADS.items():
        shape = Shape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            block_size=block_size,
        )
        for step, check in CHECKS.items():
            try:
                check(setting, shape)
            except AssertionError as error:
                failures.append(f"{heads}, {step}: {' '.join(str(error).split())[:160]}")
    assert not failures, f"{len(failures)} steps, first {failures[:3]}"
    return f"{len(HEADS) * len(CHECKS)} steps"
