"""The resolved options of an engine: every value that its parts are built with."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from sensorium.checkpoints.first_look import check_context, parse_length
from sensorium.core.admission import Limits
from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.scheduler import Scheduler
from sensorium.engine.assembly.memory import MemoryPlan, format_bytes
from sensorium.engine.assembly.options import EngineOptions
from sensorium.layers.kv_layout import LayerGroup, plan_cross_cache, plan_kv_cache
from sensorium.models.ctc_transducer import CONTEXT
from sensorium.models.long_context import ContextLimit
from sensorium.types.errors import ModelError
from sensorium.types.model_kind import ModelKind
from sensorium.types.scheduling import KVCacheGroup

logger = logging.getLogger(__name__)

_ENCODER_CACHE_SIZE = 16_384  # the largest image of the Qwen-VL families
_FRAME_CACHE_SIZE = 2**20  # 5 hours for wav2vec2, a day for Parakeet, in 16 MiB
# Device type -> share of the memory that is free after the weights are loaded. On a CPU other
# programs also need memory; on CUDA `gpu_memory_utilization` has already left some to them.
_MEMORY_SHARE = {"cpu": 0.25, "cuda": 1.0}
# Device type -> the most tokens in a step. On a CPU a step of 2048 tokens takes seconds, in which
# no other request gets a token, and is no faster per token than a step of 512.
_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
# Device type -> the most media embeddings in a step. One item of many models has more than 512.
_MAX_NUM_ENCODER_EMBEDS = {"cpu": 2048, "cuda": 8192}
# Device type -> from how many tokens on a prompt is long and lets other prompts go first, unless a
# step has fewer.
_LONG_PREFILL = {"cpu": 512, "cuda": 2048}
# Device types on which long prompts pause while other requests run: one step for each 8 of their
# tokens. On a CPU, 8 tokens take a quarter of the time of a step in which each request has one
# token, or as long as that step if thousands of tokens precede them. A GPU computes both in one
# step.
_PAUSING_DEVICES = {"cpu"}
_TOKENS_PER_PAUSED_STEP = 8
# Device types that compute a step while the host continues. A CPU computes a step at once, and
# would only give its results later if the next one was launched first.
OVERLAP_DEVICES = {"cuda"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of an engine after defaults were filled in; they never change afterwards."""

    limits: Limits
    groups: tuple[KVCacheGroup, ...]
    block_size: int
    enable_prefix_caching: bool
    scheduling_policy: str
    attention_backend: str  # the chosen one, never "auto"
    memory: MemoryPlan
    overlap: bool = False  # each step is planned while the one before it is computed
    graphs: str = "none"  # which steps are replayed as graphs, or why none are
    fused: str = "nothing"


def make_scheduler(config: EngineConfig) -> Scheduler:
    """Return a new scheduler with an empty KV cache and an empty encoder cache."""
    return Scheduler(
        config.limits,
        kv_cache=KVCacheManager(
            config.groups,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        encoder_cache=EncoderCacheManager(config.limits.encoder_cache_size),
        policy=config.scheduling_policy,
    )


def resolve_limits(
    options: EngineOptions,
    *,
    text_config: PretrainedConfig,
    kind: ModelKind,
    device: torch.device,
) -> Limits:
    """Return the limits of the context and of a step, with defaults for unset options.

    If the user did not set `max_model_len`, the loaded model and the KV cache may reduce it later.
    """
    is_cuda = device.type == "cuda"
    max_num_batched_tokens = options.max_num_batched_tokens or _MAX_NUM_BATCHED_TOKENS[device.type]
    threshold = options.long_prefill_token_threshold
    if threshold is None:
        threshold = min(_LONG_PREFILL[device.type], max_num_batched_tokens)
    return Limits(
        max_model_len=resolve_context(options, text_config=text_config, kind=kind),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs or (256 if is_cuda else 32),
        encoder_cache_size=options.encoder_cache_size
        or (_FRAME_CACHE_SIZE if kind.decoder == "none" else _ENCODER_CACHE_SIZE),
        max_num_encoder_embeds=options.max_num_encoder_embeds
        or options.max_num_batched_tokens
        or _MAX_NUM_ENCODER_EMBEDS[device.type],
        disable_chunked_mm_input=options.disable_chunked_mm_input,
        long_prefill_token_threshold=threshold,
        long_prefill_pause=-(-threshold // _TOKENS_PER_PAUSED_STEP)
        if device.type in _PAUSING_DEVICES
        else 0,
    )


def resolve_context(
    options: EngineOptions, *, text_config: PretrainedConfig, kind: ModelKind
) -> int:
    """Return the user's `max_model_len`, or else the model's context length in tokens.

    Raise a `ModelError` if neither is known, or if the user's value exceeds the model's.
    """
    context = CONTEXT if kind.decoder == "none" else None
    for key in ("max_target_positions", "max_position_embeddings"):
        context = context or parse_length(getattr(text_config, key, None))
    max_model_len: int | None = options.max_model_len or context
    if max_model_len is None:
        raise ModelError("the model's config has no context length: set max_model_len")
    check_context(max_model_len, context)
    return max_model_len


def limit_context(options: EngineOptions, limits: Limits, limit: ContextLimit | None) -> Limits:
    """Reduce `max_model_len` to the number of tokens that the loaded model computes correctly.

    Raise a `ModelError` if the user explicitly asked for a longer context.
    """
    if limit is None or limits.max_model_len < limit.num_tokens:
        return limits
    if options.max_model_len is not None and options.max_model_len > limit.num_tokens:
        raise ModelError(
            f"max_model_len={options.max_model_len} is more than the {limit.num_tokens} tokens "
            f"that this model can be run with, because {limit.reason}"
        )
    logger.warning("the context ends at %d tokens, because %s", limit.num_tokens, limit.reason)
    return replace(limits, max_model_len=limit.num_tokens)


def resolve_config(
    options: EngineOptions,
    *,
    limits: Limits,
    layer_groups: tuple[LayerGroup, ...],
    element_size: int,
    device: torch.device,
    attention_backend: str,
    memory: MemoryPlan,
    free_bytes: int,  # after the model was loaded
    max_cross_positions: int = 0,
) -> EngineConfig:
    """Return the final settings of an engine, with the sizes of its KV cache.

    `element_size` is the number of bytes of one key or value element. Raise a `ModelError` if the
    KV cache or the context that the user asked for does not fit.
    """
    block_bytes = [
        group.num_bytes_per_block(block_size=options.block_size, element_size=element_size)
        for group in layer_groups
    ]
    room = max(0, free_bytes - memory.reserve_bytes)
    memory_bytes = options.kv_cache_memory_bytes
    if memory_bytes is None:
        # Enough for all requests at full length, but not more than a share of what is free.
        most_tokens = limits.max_num_seqs * (limits.max_model_len + max_cross_positions)
        wanted = (-(-most_tokens // options.block_size) + 1) * sum(block_bytes)
        memory_bytes = min(wanted, int(room * _MEMORY_SHARE[device.type]))
    elif memory_bytes > room:
        raise ModelError(
            f"kv_cache_memory_bytes={memory_bytes} ({format_bytes(memory_bytes)}) is more than the "
            f"{format_bytes(room)} free on {device}, besides "
            f"{format_bytes(memory.reserve_bytes)} for encoders and steps: give a smaller value"
        )
    groups = _plan_groups(
        layer_groups, limits, max_cross_positions, memory_bytes, options.block_size, element_size
    )
    kv_cache_bytes = sum(
        group.num_blocks * size for group, size in zip(groups, block_bytes, strict=True)
    )
    return EngineConfig(
        limits=replace(limits, max_model_len=_fit_context(options, limits, groups)),
        groups=groups,
        block_size=options.block_size,
        enable_prefix_caching=options.enable_prefix_caching,
        scheduling_policy=options.scheduling_policy,
        attention_backend=attention_backend,
        memory=replace(memory, kv_cache_bytes=kv_cache_bytes),
        overlap=options.overlap and device.type in OVERLAP_DEVICES,
    )


def _plan_groups(
    layer_groups: tuple[LayerGroup, ...],
    limits: Limits,
    max_cross_positions: int,
    memory_bytes: int,
    block_size: int,
    element_size: int,
) -> tuple[KVCacheGroup, ...]:
    """Divide the memory of the KV cache among groups of layers."""
    if max_cross_positions:
        return plan_cross_cache(
            layer_groups,
            memory_bytes=memory_bytes,
            block_size=block_size,
            element_size=element_size,
            max_tokens=limits.max_model_len,
            max_cross_positions=max_cross_positions,
        )
    window = max((group.window or 0 for group in layer_groups), default=0)
    return plan_kv_cache(
        layer_groups,
        memory_bytes=memory_bytes,
        block_size=block_size,
        element_size=element_size,
        max_tokens_per_window_group=limits.max_num_seqs * (window + 2 * block_size)
        + max(limits.max_num_batched_tokens, limits.max_model_len),
    )


def _fit_context(options: EngineOptions, limits: Limits, groups: tuple[KVCacheGroup, ...]) -> int:
    """Return `max_model_len`, reduced if the KV cache can't hold one request of that length.

    Layers with sliding-window attention don't count, because they keep only the latest tokens.
    Raise a `ModelError` if the user explicitly asked for a longer context.
    """
    capacity = min(
        ((group.num_blocks - 1) * options.block_size for group in groups if group.window is None),
        default=limits.max_model_len,
    )
    if limits.max_model_len <= capacity:
        return limits.max_model_len
    if options.max_model_len is not None:
        raise ModelError(
            f"max_model_len={options.max_model_len} does not fit: the KV cache holds {capacity} "
            "tokens. Give a larger kv_cache_memory_bytes or a smaller max_model_len"
        )
    logger.warning(
        "the context is cut to %d tokens, which is what the KV cache holds "
        "(a larger kv_cache_memory_bytes holds more)",
        capacity,
    )
    return capacity
