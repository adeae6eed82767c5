"""Chooses the attention backend once at start, after a trial, and logs the reasons.

`auto` selects the first backend that works on this machine. It prefers kernels that read pages in
place; `torch_backend`, which gathers pages into dense tensors, always works. A backend that the
user names is never replaced: if it can't be used, that is an error.

A kernel may be missing, fail to compile or reject a shape for reasons that can't be foreseen. The
trial finds that at start and not in a request. It also compiles the kernels that are compiled on
demand. Its results are compared with those of `torch_backend`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from sensorium.layers.attention.backend import GroupTables, LayerCache, PagedAttention, StepLayout
from sensorium.layers.attention.flashinfer_backend import FlashInferAttention
from sensorium.layers.attention.torch_backend import TorchPagedAttention
from sensorium.layers.attention.triton_backend import TritonPagedAttention
from sensorium.layers.attention.varlen_backend import VarlenAttention
from sensorium.layers.kv_layout import LayerSpec
from sensorium.types.errors import ModelError

logger = logging.getLogger(__name__)

_Candidate = type[FlashInferAttention] | type[VarlenAttention] | type[TritonPagedAttention]
# Best first.
_CANDIDATES: dict[str, _Candidate] = {
    "flashinfer": FlashInferAttention,
    "varlen": VarlenAttention,
    "triton": TritonPagedAttention,
}
_QUERY_LENS = (1, 5)  # the requests of a trial: a decoding one and a chunk of a prompt


def choose_attention(
    name: str,
    *,
    layers: Sequence[LayerSpec],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedAttention:
    """Return the attention backend with this name, or for `auto` the best one that works here.

    Each candidate is first tried on random data for these layers. Raise `ModelError` if the named
    backend can't be used.
    """
    reasons = []
    for candidate in _CANDIDATES if name == "auto" else {name} - {"torch"}:
        found = _try(candidate, layers, block_size=block_size, dtype=dtype, device=device)
        if not isinstance(found, str):
            logger.info("attention backend: %s", candidate)
            return found
        if name != "auto":
            raise ModelError(f"attention_backend={name!r} can't be used: {found}")
        reasons.append(f"not {candidate}: {found}")
    logger.info("attention backend: torch (%s)", "; ".join(reasons) or "as configured")
    return TorchPagedAttention(block_size=block_size, dtype=dtype)


def _try(
    name: str,
    layers: Sequence[LayerSpec],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedAttention | str:
    """Return the named backend if it computes these layers correctly, or why it can't be used."""
    candidate = _CANDIDATES[name]
    if (obstacle := candidate.find_obstacle(layers, dtype, device)) is not None:
        return obstacle
    try:
        attention = candidate(block_size=block_size, dtype=dtype, device=device)
        fault = find_fault(attention, layers, block_size=block_size, dtype=dtype, device=device)
    except Exception as error:
        # Imports, compilers and kernels raise many kinds of errors. Each means that the backend
        # can't be used on this machine.
        logger.debug("the trial of %s failed", name, exc_info=True)
        # The text may contain a compiler's whole output, so it is cut. The debug log has all of it.
        return f"a trial failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
    return attention if fault is None else f"a trial gave wrong numbers: {fault}"


@torch.inference_mode()
def find_fault(
    attention: PagedAttention,
    layers: Sequence[LayerSpec],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Return what is wrong with a backend's results for these layers, or None if they are right.

    Each distinct shape of layer is computed once on random data, and compared with the torch
    backend. Errors of the backend are not caught.
    """
    kinds = {
        (layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.window): layer
        for layer in layers
    }
    gather = TorchPagedAttention(block_size=block_size, dtype=dtype)
    for layer in kinds.values():
        layout = _make_layout(layer.window, block_size, device)
        expected = _run(gather, layer, layout, block_size, dtype)
        output = _run(attention, layer, layout, block_size, dtype)
        error = float((output.float() - expected.float()).abs().max())
        if not error <= 8 * torch.finfo(dtype).eps:  # `not <=` is also true for NaN
            return f"heads of size {layer.key_dim}, window {layer.window}: off by {error:.3g}"
    return None


def _run(
    attention: PagedAttention,
    layer: LayerSpec,
    layout: StepLayout,
    block_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a backend's output for one layer of a step with random numbers, always the same."""
    device = layout.groups[0].block_tables.device
    random = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device, dtype=dtype)

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
    """Return a test step: a decoding request and a part of a prompt, both with cached tokens."""
    seq_lens = (2 * block_size + 1, block_size + _QUERY_LENS[1])
    width = max(-(-length // block_size) for length in seq_lens)
    tables = torch.arange(1, 1 + 2 * width).view(2, width)
    slots = [
        int(tables[row, position // block_size]) * block_size + position % block_size
        for row, (query_len, seq_len) in enumerate(zip(_QUERY_LENS, seq_lens, strict=True))
        for position in range(seq_len - query_len, seq_len)
    ]
    group = GroupTables(
        window=window, slot_mapping=torch.tensor(slots).to(device), block_tables=tables.to(device)
    )
    return StepLayout(query_lens=_QUERY_LENS, seq_lens=seq_lens, groups=(group,), attend_until=None)
