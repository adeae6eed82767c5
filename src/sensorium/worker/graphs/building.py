"""Captures the CUDA graphs of an engine at its start, or gives the reason why it has none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import torch

from sensorium.layers import kernels
from sensorium.layers.attention.selection import find_fault
from sensorium.layers.attention.triton_backend import TritonPagedAttention
from sensorium.layers.kv_layout import LayerSpec
from sensorium.models.hf_model import HfModel
from sensorium.types.scheduling import KVCacheGroup
from sensorium.utils.process import long_work
from sensorium.worker.graphs.decode_buffers import DecodeBuffers
from sensorium.worker.graphs.decode_graphs import DecodeGraphs, DecodeKernels, TritonKernels
from sensorium.worker.graphs.encoder_graphs import EncoderGraphs
from sensorium.worker.graphs.recorder import CudaRecorder, Recorder
from sensorium.worker.graphs.segments import SegmentGraphs
from sensorium.worker.kv_cache import KVCache

logger = logging.getLogger(__name__)
_AUDIO = "its decoder gets the audio of new requests as well"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """A set of engine settings that decide which CUDA graphs are captured."""

    enforce_eager: bool = False
    sizes: Sequence[int] | None = None  # of decode steps; None: those of `get_decode_sizes`
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    use_tqdm: bool = False  # shows progress bars on a terminal
    # The memory for graphs of encoders, which are captured while the engine runs. If it is not 0,
    # the engine must be the only one in its process that uses the device.
    encoder_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """The CUDA graphs of an engine, with None for each kind that could not be captured."""

    decoding: DecodeGraphs | None = None  # for steps in which every request decodes
    segments: SegmentGraphs | None = None  # for steps with tokens of prompts
    encoders: EncoderGraphs | None = None
    words: str = "none"  # describes the first two for logs and status pages, with reasons


NO_GRAPHS = Graphs()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphParts:
    """The kernels and recorders for CUDA graphs; tests pass stand-ins that need no GPU."""

    kernels: DecodeKernels
    recorder: Recorder  # of decode steps
    segment_recorder: Recorder  # of steps with tokens of prompts
    encoder_recorder: Recorder


def find_graph_parts(
    hf_model: HfModel, layers: Sequence[LayerSpec], *, block_size: int
) -> GraphParts | str:
    """Return the kernels and recorders for CUDA graphs, or the reason why none can be captured.

    The kernels are first run once on the model's device, for each kind of layer.
    """
    device, dtype = hf_model.device, hf_model.dtype
    if (obstacle := kernels.find_obstacle(device)) is not None:
        return obstacle
    try:
        attention = TritonPagedAttention(block_size=block_size, dtype=dtype, device=device)
        fault = find_fault(attention, layers, block_size=block_size, dtype=dtype, device=device)
    except Exception as error:  # compilers and kernels raise many kinds of errors
        logger.debug("the trial of the decode kernels failed", exc_info=True)
        return (
            "a trial of the decode kernels failed: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        )
    if fault is not None:
        return f"a trial of the decode kernels gave wrong numbers: {fault}"
    return GraphParts(
        kernels=TritonKernels(),
        recorder=CudaRecorder(device),
        segment_recorder=CudaRecorder(device),
        encoder_recorder=CudaRecorder(device),
    )


def build_graphs(
    hf_model: HfModel,
    options: GraphOptions,
    *,
    layers: Sequence[LayerSpec],
    kv_cache: KVCache,
    groups: Sequence[KVCacheGroup],
    block_size: int,
) -> Graphs:
    """Capture the CUDA graphs of an engine, and return those that could be captured."""
    if options.enforce_eager:
        return Graphs(words="none: they are turned off (enforce_eager)")
    started, before = monotonic(), _get_used_bytes(hf_model.device)
    with long_work():
        parts = find_graph_parts(hf_model, layers, block_size=block_size)
        if isinstance(parts, str):
            _warn("steps run slower, without CUDA graphs: %s", parts, hf_model.device)
            return Graphs(words=f"none: {parts}")
        sizes = get_decode_sizes(options.max_num_seqs, options.sizes)
        decoding = DecodeGraphs(
            hf_model,
            kv_cache=kv_cache,
            groups=groups,
            buffers=_make_buffers(hf_model, options, groups, block_size),
            kernels=parts.kernels,
            recorder=parts.recorder,
            sizes=sizes,
        )
        token_sizes = get_token_sizes(options.max_num_batched_tokens)
        segments = SegmentGraphs(
            hf_model,
            kv_cache=kv_cache,
            num_groups=len(groups),
            kernels=parts.kernels,
            recorder=parts.segment_recorder,
            sizes=token_sizes,
        )
        logger.info("capturing CUDA graphs: %d batch sizes of decode steps", len(sizes))
        no_segments: str | None = _AUDIO
        has_audio = hf_model.kind.media != "in_prompt"
        if not has_audio:
            logger.info("capturing CUDA graphs: %d token counts with prompts", len(token_sizes))
            no_segments = segments.capture(use_tqdm=options.use_tqdm)
        no_decoding = decoding.capture(use_tqdm=options.use_tqdm)
    if no_decoding is not None:
        _warn("decode steps run slower, without CUDA graphs: %s", no_decoding, hf_model.device)
    if no_segments is not None and not has_audio:
        _warn(
            "steps with prompts run slower, without CUDA graphs: %s", no_segments, hf_model.device
        )
    _log_cost(hf_model.device, started, before)
    return Graphs(
        decoding=decoding if no_decoding is None else None,
        segments=segments if no_segments is None else None,
        encoders=_make_encoder_graphs(hf_model, parts.encoder_recorder, options.encoder_bytes),
        words=f"decoding {_describe(sizes, no_decoding)}; "
        f"prompts {_describe(token_sizes, no_segments)}",
    )


def _make_encoder_graphs(
    hf_model: HfModel, recorder: Recorder, max_bytes: int
) -> EncoderGraphs | None:
    return EncoderGraphs(hf_model, recorder, max_bytes=max_bytes) if max_bytes else None


def get_decode_sizes(max_num_seqs: int, chosen: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the batch sizes for which decode graphs are captured, in ascending order.

    By default these are 1, 2, 4, the multiples of 8 below `max_num_seqs`, and `max_num_seqs`
    itself. The user's `chosen` sizes are used instead, each reduced to `max_num_seqs` if it is
    larger.
    """
    if chosen is not None:
        return tuple(sorted({min(size, max_num_seqs) for size in chosen}))
    sizes = {1, 2, 4, *range(8, max_num_seqs, 8)}
    return tuple(sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs}))


def get_token_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Return the token counts for which steps with prompts are captured, in ascending order.

    The counts are so close that padding to the next one adds less than a quarter to a step of more
    than 256 tokens.
    """
    sizes = {16, 32, 64, 96}
    for first, last, step in ((128, 512, 64), (512, 2048, 128), (2048, max_num_tokens, 512)):
        sizes.update(range(first, last + 1, step))
    return tuple(sorted({size for size in sizes if size < max_num_tokens} | {max_num_tokens}))


def _make_buffers(
    hf_model: HfModel, options: GraphOptions, groups: Sequence[KVCacheGroup], block_size: int
) -> DecodeBuffers:
    return DecodeBuffers(
        groups=groups,
        block_size=block_size,
        max_batch=options.max_num_seqs,
        max_model_len=options.max_model_len,
        max_cross_positions=hf_model.max_cross_positions,
        has_mrope=hf_model.has_mrope,
        has_long_factors=hf_model.long_after is not None,
        audios=_make_audios(hf_model, options.max_num_seqs),
        device=hf_model.device,
    )


def _make_audios(hf_model: HfModel, max_batch: int) -> torch.Tensor | None:
    """Return memory for the streaming audio of a step, or None if the model takes none."""
    if not hf_model.kind.is_streaming:
        return None
    width = int(hf_model.text_config.hidden_size)
    return torch.zeros(max_batch, width, dtype=hf_model.dtype, device=hf_model.device)


def _describe(sizes: Sequence[int], reason: str | None) -> str:
    if reason is not None:
        return f"not captured ({reason})"
    return f"in {len(sizes)} size{'s' * (len(sizes) > 1)} up to {sizes[-1]}"


def _warn(words: str, reason: str, device: torch.device) -> None:
    """Log a warning on a GPU only, because a CPU never has CUDA graphs."""
    if device.type == "cuda":
        logger.warning(words, reason)


def _log_cost(device: torch.device, started: float, before: tuple[int, int]) -> None:
    now = _get_used_bytes(device)
    used, reserved = ((after - then) >> 20 for after, then in zip(now, before, strict=True))
    logger.info(
        "capturing CUDA graphs took %.1f s and %d MiB of GPU memory (%d MiB of it for tensors)",
        *(monotonic() - started, used, reserved),
    )


def _get_used_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes in use on a CUDA device, and those of them that torch has reserved."""
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free, torch.cuda.memory_reserved(device)
