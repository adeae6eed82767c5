"""Makes the graphs of an engine at its start, or says why it has none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import torch

from sensorium.layers import kernels
from sensorium.layers.attention.trial import find_fault
from sensorium.layers.attention.triton_backend import TritonPagedAttention
from sensorium.layers.kv_layout import LayerSpec
from sensorium.models.adapter import ModelAdapter
from sensorium.types.scheduling import KVCacheGroup
from sensorium.utils.long_work import long_work
from sensorium.worker.graphs.decode_buffers import DecodeBuffers
from sensorium.worker.graphs.decode_graphs import DecodeGraphs, DecodeKernels, TritonKernels
from sensorium.worker.graphs.recorder import CudaRecorder, Recorder
from sensorium.worker.graphs.sizes import get_decode_sizes
from sensorium.worker.kv_cache import KVCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """`sizes`: the batch sizes that have a graph; `None`: as many as are useful."""

    enforce_eager: bool = False
    sizes: tuple[int, ...] | None = None
    max_num_seqs: int
    max_model_len: int
    use_tqdm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphParts:
    """What graphs are made with. Tests make them without a GPU."""

    kernels: DecodeKernels
    recorder: Recorder


def find_graph_parts(
    adapter: ModelAdapter, layers: Sequence[LayerSpec], *, block_size: int
) -> GraphParts | str:
    """Return what graphs need on the adapter's device, or why they can't be had."""
    device, dtype = adapter.device, adapter.dtype
    if (obstacle := kernels.find_obstacle(device)) is not None:
        return obstacle
    try:
        attention = TritonPagedAttention(block_size=block_size, dtype=dtype, device=device)
        fault = find_fault(attention, layers, block_size=block_size, dtype=dtype, device=device)
    except Exception as error:  # compilers and kernels fail in their own ways
        logger.debug("the trial of the decode kernels failed", exc_info=True)
        return f"a trial failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if fault is not None:
        return f"a trial gave wrong numbers: {fault}"
    return GraphParts(kernels=TritonKernels(), recorder=CudaRecorder(device))


def build_decode_graphs(
    adapter: ModelAdapter,
    options: GraphOptions,
    *,
    layers: Sequence[LayerSpec],
    kv_cache: KVCache,
    groups: Sequence[KVCacheGroup],
    block_size: int,
) -> tuple[DecodeGraphs | None, str]:
    """Return the captured graphs and what they serve, or `None` and the reason."""
    if options.enforce_eager:
        return None, "none: enforce_eager"
    with long_work():
        parts = find_graph_parts(adapter, layers, block_size=block_size)
        if isinstance(parts, str):
            return _give_up(parts, adapter.device)
        sizes = options.sizes or get_decode_sizes(options.max_num_seqs)
        sizes = tuple(sorted({size for size in sizes if size <= options.max_num_seqs}))
        graphs = DecodeGraphs(
            adapter,
            kv_cache=kv_cache,
            windows=[group.window for group in groups],
            buffers=DecodeBuffers(
                groups=groups,
                block_size=block_size,
                max_batch=options.max_num_seqs,
                max_model_len=options.max_model_len,
                has_mrope=adapter.has_mrope,
                has_long_factors=adapter.long_after is not None,
                device=adapter.device,
            ),
            kernels=parts.kernels,
            recorder=parts.recorder,
            sizes=sizes,
        )
        started = monotonic()
        reason = graphs.capture(use_tqdm=options.use_tqdm)
    if reason is not None:
        return _give_up(reason, adapter.device)
    seconds = monotonic() - started
    logger.info("captured CUDA graphs of %d batch sizes in %.1f s", len(sizes), seconds)
    return graphs, f"decoding, {len(sizes)} batch sizes up to {sizes[-1]}"


def _give_up(reason: str, device: torch.device) -> tuple[None, str]:
    if _is_worth_a_warning(device):
        logger.warning("steps run without CUDA graphs: %s", reason)
    return None, f"none: {reason}"


def _is_worth_a_warning(device: torch.device) -> bool:
    return device.type == "cuda"
