"""Tests at start whether an attention backend runs a model's layers and gives the right numbers.

A kernel may be missing, fail to compile or reject a shape for reasons that can't be foreseen. The
trial finds that at start and not in a request. It also compiles the kernels that are compiled on
demand. The right numbers are those of the gather in `torch_backend`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sensorium.layers.attention.backend import GroupTables, LayerCache, PagedAttention, StepLayout
from sensorium.layers.attention.torch_backend import TorchPagedAttention
from sensorium.layers.kv_layout import LayerSpec

_QUERY_LENS = (1, 5)  # a decoding request and a chunk of a prompt


@torch.inference_mode()
def find_fault(
    attention: PagedAttention,
    layers: Sequence[LayerSpec],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Return what goes wrong when each kind of layer runs once, or `None` if nothing does."""
    kinds = {
        (layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.window): layer
        for layer in layers
    }
    gather = TorchPagedAttention(block_size=block_size, dtype=dtype)
    for layer in kinds.values():
        expected = _run(gather, layer, block_size=block_size, dtype=dtype, device=device)
        output = _run(attention, layer, block_size=block_size, dtype=dtype, device=device)
        error = float((output.float() - expected.float()).abs().max())
        if not error <= 8 * torch.finfo(dtype).eps:  # `not <=` is also true for NaN
            return f"heads of size {layer.key_dim}, window {layer.window}: off by {error:.3g}"
    return None


def _run(
    attention: PagedAttention,
    layer: LayerSpec,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return the output of a random step, which is the same for every backend."""
    random = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device, dtype=dtype)

    layout = _make_layout(layer.window, block_size, device)
    num_blocks = 1 + layout.groups[0].block_tables.numel()
    num_heads, num_tokens = layer.num_kv_heads, sum(_QUERY_LENS)
    cache = LayerCache(
        keys=randn(num_blocks, block_size, num_heads, layer.key_dim),
        values=randn(num_blocks, block_size, num_heads, layer.value_dim),
        group_index=0,
        is_shared=False,
    )
    attention.prepare(layout)
    return attention.attend(
        cache,
        randn(1, 2 * num_heads, num_tokens, layer.key_dim),
        randn(1, num_heads, num_tokens, layer.key_dim),
        randn(1, num_heads, num_tokens, layer.value_dim),
        scaling=None,
    )


def _make_layout(window: int | None, block_size: int, device: torch.device) -> StepLayout:
    """Return a step of two requests that both have earlier tokens in the cache.

    No block is used twice.
    """
    seq_lens = (2 * block_size + 1, block_size + _QUERY_LENS[1])
    width = max(-(-length // block_size) for length in seq_lens)
    tables = torch.arange(1, 1 + 2 * width).view(2, width)
    slots = [
        int(tables[row, position // block_size]) * block_size + position % block_size
        for row, (query_len, seq_len) in enumerate(zip(_QUERY_LENS, seq_lens, strict=True))
        for position in range(seq_len - query_len, seq_len)
    ]
    group = GroupTables(
        window=window,
        slot_mapping=torch.tensor(slots).to(device),
        block_tables=tables.to(device),
    )
    return StepLayout(query_lens=_QUERY_LENS, seq_lens=seq_lens, groups=(group,), attend_until=None)
