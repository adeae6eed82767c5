"""Chooses the attention backend once at start, and logs the reasons.

`auto` takes the first backend that works here. It prefers kernels that read pages in place; the
gather of `torch_backend` always works. A backend that the user names is never replaced: if it can't
be used, that is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sensorium.layers.attention import flashinfer_backend, triton_backend, varlen_backend
from sensorium.layers.attention.backend import PagedAttention
from sensorium.layers.attention.flashinfer_backend import FlashInferAttention
from sensorium.layers.attention.torch_backend import TorchPagedAttention
from sensorium.layers.attention.trial import find_fault
from sensorium.layers.attention.triton_backend import TritonPagedAttention
from sensorium.layers.attention.varlen_backend import VarlenAttention
from sensorium.layers.kv_layout import LayerSpec
from sensorium.types.errors import ModelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    find_obstacle: Callable[..., str | None]
    make: Callable[..., PagedAttention]


# Best first.
_CANDIDATES = {
    "flashinfer": _Candidate(
        find_obstacle=flashinfer_backend.find_obstacle, make=FlashInferAttention
    ),
    "varlen": _Candidate(find_obstacle=varlen_backend.find_obstacle, make=VarlenAttention),
    "triton": _Candidate(find_obstacle=triton_backend.find_obstacle, make=TritonPagedAttention),
}


def choose_attention(
    name: str,
    *,
    layers: Sequence[LayerSpec],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedAttention:
    """Return the backend of a name, or the best one for `auto`.

    Raises a `ModelError` if the named backend can't be used.
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
    logger.info("attention backend: torch (%s)", "; ".join(reasons) or "as asked for")
    return TorchPagedAttention(block_size=block_size, dtype=dtype)


def _try(
    name: str,
    layers: Sequence[LayerSpec],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedAttention | str:
    """Return the backend, or the reason why it can't be used."""
    candidate = _CANDIDATES[name]
    obstacle = candidate.find_obstacle(layers, dtype=dtype, device=device)
    if obstacle is not None:
        return obstacle
    try:
        attention = candidate.make(block_size=block_size, dtype=dtype, device=device)
        fault = find_fault(attention, layers, block_size=block_size, dtype=dtype, device=device)
    except Exception as error:
        # Imports, compilers and kernels raise many kinds of errors. Each means that the backend
        # can't be used on this machine.
        logger.debug("the trial of %s failed", name, exc_info=True)
        # The text may contain a compiler's whole output, so it is cut. The debug log has all of it.
        return f"a trial failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
    return attention if fault is None else f"a trial gave wrong numbers: {fault}"
