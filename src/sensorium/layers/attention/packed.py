"""Computes the attention of encoders in a packed batch: each token attends to its own sequence.

A packed batch has several sequences one after another in the same dimension, without padding. On a
CUDA device, in half precision, torch's `varlen_attn` is one kernel for all sequences. Elsewhere,
sequences of equal length form one batch of `scaled_dot_product_attention`: an encoder with windows
has hundreds of sequences, but only of a few different lengths.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from sensorium.layers.attention.backend import find_common_obstacle
from sensorium.utils.arrays import to_device

logger = logging.getLogger(__name__)

_MAX_HEAD_DIM = 256
_HEAD_DIM_STEP = 8  # the kernel needs head sizes that are multiples of it
_ALIGNMENT = 16  # in bytes, for the kernel's loads
_TRIAL_LENGTHS = (5, 17, 1, 40)


@dataclass(frozen=True)
class PackedLengths:
    """The lengths of the sequences of a packed batch, on the host and on the device."""

    lengths: tuple[int, ...]
    # The first token of each sequence, and the total: int32 [sequences + 1], on the batch's device.
    starts: torch.Tensor
    longest: int

    @staticmethod
    def from_starts(starts: torch.Tensor, host_starts: torch.Tensor) -> PackedLengths:
        """Return the lengths of the sequences that begin at `starts`; the last entry is the total.

        `host_starts` are the same numbers in host memory, which saves a wait for the device.
        """
        lengths = tuple(b - a for a, b in pairwise(host_starts.tolist()))
        return PackedLengths(lengths, starts.to(torch.int32), max(lengths, default=0))

    @cached_property  # it is kept here, because a CUDA graph may read it later
    def groups(self) -> Sequence[tuple[int, torch.Tensor]]:
        """Pairs of a length and the indices of all tokens in sequences of that length."""
        return _group_by_length(self.lengths, self.starts.device)


# A function of queries, keys and values [1, H, N, D], the lengths of the sequences in them, and the
# scaling. It returns the output as [1, N, H, D].
PackedKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, PackedLengths, float | None], torch.Tensor
]


def attend_in_batches(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: PackedLengths,
    scaling: float | None,
) -> torch.Tensor:
    """Return the attention output [1, N, H, D] of packed sequences, with one call per length."""
    num_heads, num_tokens, head_dim = query.shape[1:]
    output = query.new_empty(num_tokens, num_heads, head_dim)
    for length, rows in lengths.groups:
        parts = (
            tensor[0].transpose(0, 1)[rows].view(-1, length, num_heads, head_dim)
            for tensor in (query, key, value)
        )
        q, k, v = (part.transpose(1, 2) for part in parts)
        result = scaled_dot_product_attention(q, k, v, scale=scaling)
        output[rows] = result.transpose(1, 2).reshape(-1, num_heads, head_dim)
    return output[None]


@lru_cache(maxsize=64)  # all layers of an encoder ask for the same one or two groupings
def _group_by_length(
    lengths: tuple[int, ...], device: torch.device
) -> tuple[tuple[int, torch.Tensor], ...]:
    """Return the `PackedLengths.groups` of these lengths, without empty sequences."""
    starts_by_length: dict[int, list[int]] = {}
    start = 0
    for length in lengths:
        if length:
            starts_by_length.setdefault(length, []).append(start)
        start += length
    groups = []
    for length, starts in starts_by_length.items():
        indices = torch.tensor(starts)[:, None] + torch.arange(length)
        groups.append((length, to_device(indices.flatten(), device)))
    return tuple(groups)


def attend_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: PackedLengths,
    scaling: float | None,
) -> torch.Tensor:
    """Return the attention output [1, N, H, D] of packed sequences, with torch's `varlen_attn`."""
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn
    head_dim = query.shape[-1]
    num_missing = -head_dim % _HEAD_DIM_STEP
    tensors = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    if num_missing:
        tensors = [pad(tensor, (0, num_missing)) for tensor in tensors]
    output = varlen_attn(
        *(tensor if _is_aligned(tensor) else tensor.contiguous() for tensor in tensors),
        *(lengths.starts, lengths.starts, lengths.longest, lengths.longest),
        scale=head_dim**-0.5 if scaling is None else scaling,
    )
    result: torch.Tensor = output[None, ..., :head_dim]
    return result


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether the kernel can read a tensor without a copy: it is dense and aligned."""
    *outer, inner = tensor.stride()
    starts = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in outer))
    return inner == 1 and all(start % _ALIGNMENT == 0 for start in starts)


@cache
def choose_packed_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> PackedKernel:
    """Return `attend_varlen` if it passes a test on this device, or else `attend_in_batches`."""
    obstacle = _find_obstacle(device, dtype, head_dim)
    if obstacle is None:
        logger.info("attention of encoders: torch's varlen_attn")
        return attend_varlen
    logger.info("attention of encoders: batches of equal length (not varlen_attn: %s)", obstacle)
    return attend_in_batches


def _find_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why torch's `varlen_attn` can't be used or fails a test, or None if it works."""
    if (obstacle := find_common_obstacle((), dtype, device)) is not None:
        return obstacle
    if head_dim > _MAX_HEAD_DIM:
        return f"head sizes may be at most {_MAX_HEAD_DIM}, not {head_dim}"
    try:
        return _try_varlen(device, dtype, head_dim)
    except Exception as error:
        # Imports and kernels raise many kinds of errors. Each means that the kernel can't be used
        # on this machine.
        logger.debug("the trial of varlen failed", exc_info=True)
        return f"a trial failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _try_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(_TRIAL_LENGTHS)
    # Queries, keys and values are parts of one tensor, as they often are in encoders.
    joined = torch.randn(num_tokens, 3, 2, head_dim, generator=generator).to(device, dtype)
    query, key, value = (part.transpose(0, 1)[None] for part in joined.unbind(1))
    starts = torch.tensor([0, *accumulate(_TRIAL_LENGTHS)])
    lengths = PackedLengths.from_starts(starts.to(device), starts)
    expected = attend_in_batches(query.float(), key.float(), value.float(), lengths, None)
    found = attend_varlen(query, key, value, lengths, None)
    # The outputs are averages of random values of about 1 and are rounded a few times, so an error
    # of a few units in the last place is allowed.
    distance = float((found.float() - expected).abs().max())
    if distance > 8 * torch.finfo(dtype).eps:
        return f"a trial gave numbers that are wrong by {distance:.3g}"
    return None
