"""What the user said, made complete: every value that the engine's parts are built with."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PretrainedConfig

from sensorium.core.admission import Limits
from sensorium.engine.build.memory import MemoryPlan, format_bytes
from sensorium.layers.attention import ATTENTION_BACKENDS
from sensorium.layers.kv_layout import LayerGroup, plan_kv_cache
from sensorium.models.adapter import MODALITIES
from sensorium.models.context_limit import ContextLimit
from sensorium.models.generation_config import GENERATION_CONFIGS
from sensorium.types.errors import ModelError
from sensorium.types.scheduling import KVCacheGroup

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 16
DEFAULT_ENCODER_CACHE_SIZE = 16_384  # the largest image of the Qwen-VL families
# Of what is free once the weights are loaded. A CPU's memory belongs to others as well; on CUDA
# `gpu_memory_utilization` has left them theirs.
MEMORY_SHARE = {"cpu": 0.25, "cuda": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the user may say; `None` means: choose."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    encoder_cache_size: int | None = None
    max_num_encoder_embeds: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    enable_prefix_caching: bool = True
    disable_chunked_mm_input: bool = False
    scheduling_policy: str = "fcfs"
    attention_backend: str = "auto"
    enforce_eager: bool = False
    fusion: bool = True
    cuda_graph_sizes: Sequence[int] | None = None
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=dict)
    gpu_memory_utilization: float = 0.9
    generation_config: str = "auto"
    # Characters of a string that a JSON schema leaves free; 0: no limit; `None`: the model's own.
    structured_string_limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory_bytes",
            "encoder_cache_size",
            "max_num_encoder_embeds",
            "block_size",
        ):
            value = getattr(self, name)
            is_open = value is None and name != "block_size"
            if not is_open and not _is_count(value, at_least=1):
                raise ModelError(f"{name} must be an integer >= 1, not {value!r}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ModelError(
                f"scheduling_policy must be fcfs or priority, not {self.scheduling_policy!r}"
            )
        if self.attention_backend not in ATTENTION_BACKENDS:
            raise ModelError(
                f"unknown attention_backend {self.attention_backend!r}: "
                f"use {', '.join(ATTENTION_BACKENDS)}"
            )
        if self.generation_config not in GENERATION_CONFIGS:
            raise ModelError(
                f"generation_config must be {' or '.join(GENERATION_CONFIGS)}, "
                f"not {self.generation_config!r}"
            )
        sizes = self.cuda_graph_sizes
        if sizes is not None and not _are_sizes(sizes):
            raise ModelError(
                f"cuda_graph_sizes must be a list of integers >= 1, not {sizes!r}; "
                "enforce_eager turns CUDA graphs off"
            )
        if not _is_share(self.gpu_memory_utilization):
            raise ModelError(
                "gpu_memory_utilization must be above 0 and at most 1, "
                f"not {self.gpu_memory_utilization!r}"
            )
        limit = self.structured_string_limit
        if limit is not None and not _is_count(limit, at_least=0):
            raise ModelError(f"structured_string_limit must be an integer >= 0, not {limit!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ModelError(f"seed must be an integer, not {self.seed!r}")
        self._check_media_limits()

    @property
    def allowed_modalities(self) -> tuple[str, ...]:
        """Return the modalities that `limit_mm_per_prompt` does not switch off."""
        return tuple(m for m in MODALITIES if self.limit_mm_per_prompt.get(m) != 0)

    def _check_media_limits(self) -> None:
        if not isinstance(self.limit_mm_per_prompt, Mapping):
            raise ModelError("limit_mm_per_prompt must be a mapping, e.g. {'image': 4}")
        for modality, limit in self.limit_mm_per_prompt.items():
            if modality not in MODALITIES:
                raise ModelError(
                    f"limit_mm_per_prompt names {modality!r}: use {', '.join(MODALITIES)}"
                )
            if not _is_count(limit, at_least=0):
                raise ModelError(
                    f"limit_mm_per_prompt: {modality} must be an integer >= 0, not {limit!r}"
                )


def _is_count(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _are_sizes(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(_is_count(size, at_least=1) for size in value)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Complete, and the same for as long as the engine lives."""

    limits: Limits
    groups: tuple[KVCacheGroup, ...]
    block_size: int
    enable_prefix_caching: bool
    scheduling_policy: str
    attention_backend: str  # the chosen one, never "auto"
    memory: MemoryPlan
    graphs: str = "none"  # which steps are replayed, or why none are
    fused: str = "nothing"


def resolve_limits(
    options: EngineOptions, *, text_config: PretrainedConfig, device: torch.device
) -> Limits:
    """What can be said before the model is loaded: `max_model_len` may have to shrink afterwards,
    if nobody asked for it.
    """
    is_cuda = device.type == "cuda"
    max_num_batched_tokens = options.max_num_batched_tokens or (8192 if is_cuda else 2048)
    return Limits(
        max_model_len=resolve_context(options, text_config=text_config),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs or (256 if is_cuda else 32),
        encoder_cache_size=options.encoder_cache_size or DEFAULT_ENCODER_CACHE_SIZE,
        max_num_encoder_embeds=options.max_num_encoder_embeds or max_num_batched_tokens,
        disable_chunked_mm_input=options.disable_chunked_mm_input,
    )


def resolve_context(options: EngineOptions, *, text_config: PretrainedConfig) -> int:
    """The context in tokens: what the user said, or the model's."""
    context = getattr(text_config, "max_position_embeddings", None)
    max_model_len: int | None = options.max_model_len or context
    if max_model_len is None:
        raise ModelError("the model's config names no context length: give max_model_len")
    if context is not None and max_model_len > context:
        raise ModelError(
            f"max_model_len={max_model_len} is more than the model's context of {context}"
        )
    return max_model_len


def limit_context(options: EngineOptions, limits: Limits, limit: ContextLimit | None) -> Limits:
    """Cut the context to what the loaded model can compute; a `ModelError` if the user asked for
    more.
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
    bidirectional_modalities: frozenset[str],
    attention_backend: str,
    memory: MemoryPlan,
    free_bytes: int,  # what is left now
    long_after: int | None = None,
) -> EngineConfig:
    """Resolve the options for a loaded model. `memory` was planned before it was loaded."""
    block_bytes = [
        group.num_bytes_per_block(block_size=options.block_size, element_size=element_size)
        for group in layer_groups
    ]
    room = max(0, free_bytes - memory.reserve_bytes)
    memory_bytes = options.kv_cache_memory_bytes
    if memory_bytes is None:
        # Enough for all requests at full length, but not more than a share of what is free.
        most_tokens = limits.max_num_seqs * limits.max_model_len
        wanted = (-(-most_tokens // options.block_size) + 1) * sum(block_bytes)
        memory_bytes = min(wanted, int(room * MEMORY_SHARE[device.type]))
    elif memory_bytes > room:
        raise ModelError(
            f"kv_cache_memory_bytes={memory_bytes} ({format_bytes(memory_bytes)}) is more than the "
            f"{format_bytes(room)} free on {device} beside the {format_bytes(memory.reserve_bytes)}"
            " that encoders and steps need"
        )
    window = max((group.window or 0 for group in layer_groups), default=0)
    groups = plan_kv_cache(
        layer_groups,
        memory_bytes=memory_bytes,
        block_size=options.block_size,
        element_size=element_size,
        max_tokens_per_window_group=limits.max_num_seqs * (window + 2 * options.block_size)
        + max(limits.max_num_batched_tokens, limits.max_model_len),
    )
    kv_cache_bytes = sum(
        group.num_blocks * size for group, size in zip(groups, block_bytes, strict=True)
    )
    max_model_len = _fit_context(
        options.max_model_len, limits.max_model_len, groups, options.block_size
    )
    return EngineConfig(
        limits=replace(
            limits,
            max_model_len=max_model_len,
            bidirectional_modalities=bidirectional_modalities,
            long_after=long_after,
        ),
        groups=groups,
        block_size=options.block_size,
        enable_prefix_caching=options.enable_prefix_caching,
        scheduling_policy=options.scheduling_policy,
        attention_backend=attention_backend,
        memory=replace(memory, kv_cache_bytes=kv_cache_bytes),
    )


def _fit_context(
    asked: int | None, max_model_len: int, groups: tuple[KVCacheGroup, ...], block_size: int
) -> int:
    """A request of full length must fit into the groups that keep everything."""
    capacity = min(
        ((group.num_blocks - 1) * block_size for group in groups if group.window is None),
        default=max_model_len,
    )
    if max_model_len <= capacity:
        return max_model_len
    if asked is not None:
        raise ModelError(
            f"max_model_len={asked} does not fit: the KV cache holds {capacity} tokens. "
            "Give a larger kv_cache_memory_bytes or a smaller max_model_len"
        )
    logger.warning("the context is cut to %d tokens, which is what the KV cache holds", capacity)
    return capacity
