"""What the user said, made complete: every value that the engine's parts are built with."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PretrainedConfig

from sensorium.core.admission import Limits
from sensorium.layers.attention.selection import ATTENTION_BACKENDS
from sensorium.layers.kv_layout import LayerGroup, plan_kv_cache
from sensorium.models.adapter import MODALITIES
from sensorium.types.errors import ModelError
from sensorium.types.scheduling import KVCacheGroup

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 16
DEFAULT_ENCODER_CACHE_SIZE = 16_384  # the largest image of the Qwen-VL families
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.6}  # of what is free once the weights are loaded


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
    limit_mm_per_prompt: Mapping[str, int] = field(default_factory=dict)
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
        if not isinstance(self.limit_mm_per_prompt, Mapping):
            raise ModelError("limit_mm_per_prompt must be a mapping, e.g. {'image': 4}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ModelError(f"seed must be an integer, not {self.seed!r}")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Complete, and the same for as long as the engine lives."""

    limits: Limits
    groups: tuple[KVCacheGroup, ...]
    block_size: int
    enable_prefix_caching: bool
    scheduling_policy: str
    attention_backend: str  # the chosen one, never "auto"


def resolve_config(
    options: EngineOptions,
    *,
    text_config: PretrainedConfig,
    layer_groups: tuple[LayerGroup, ...],
    dtype: torch.dtype,
    device: torch.device,
    bidirectional_modalities: frozenset[str],
    attention_backend: str,
) -> EngineConfig:
    is_cuda = device.type == "cuda"
    max_num_seqs = options.max_num_seqs or (256 if is_cuda else 32)
    max_num_batched_tokens = options.max_num_batched_tokens or (8192 if is_cuda else 2048)
    context = getattr(text_config, "max_position_embeddings", None)
    max_model_len = options.max_model_len or context
    if max_model_len is None:
        raise ModelError("the model's config names no context length: give max_model_len")
    if context is not None and max_model_len > context:
        raise ModelError(
            f"max_model_len={max_model_len} is more than the model's context of {context}"
        )
    element_size = torch.empty((), dtype=dtype).element_size()
    memory_bytes = options.kv_cache_memory_bytes or _choose_memory_bytes(
        layer_groups, max_num_seqs * max_model_len, options.block_size, element_size, device
    )
    _check_memory(memory_bytes, device)
    window = max((group.window or 0 for group in layer_groups), default=0)
    groups = plan_kv_cache(
        layer_groups,
        memory_bytes=memory_bytes,
        block_size=options.block_size,
        element_size=element_size,
        max_tokens_per_window_group=max_num_seqs * (window + 2 * options.block_size)
        + max(max_num_batched_tokens, max_model_len),
    )
    return EngineConfig(
        limits=Limits(
            max_model_len=_fit_context(
                options.max_model_len, max_model_len, groups, options.block_size
            ),
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            encoder_cache_size=options.encoder_cache_size or DEFAULT_ENCODER_CACHE_SIZE,
            max_num_encoder_embeds=options.max_num_encoder_embeds or max_num_batched_tokens,
            bidirectional_modalities=bidirectional_modalities,
            disable_chunked_mm_input=options.disable_chunked_mm_input,
        ),
        groups=groups,
        block_size=options.block_size,
        enable_prefix_caching=options.enable_prefix_caching,
        scheduling_policy=options.scheduling_policy,
        attention_backend=attention_backend,
    )


def _choose_memory_bytes(
    layer_groups: tuple[LayerGroup, ...],
    most_tokens: int,
    block_size: int,
    element_size: int,
    device: torch.device,
) -> int:
    """Enough for all requests at full length, but not more than a share of what is free."""
    per_block = sum(
        group.num_bytes_per_block(block_size=block_size, element_size=element_size)
        for group in layer_groups
    )
    wanted = (-(-most_tokens // block_size) + 1) * per_block
    return min(wanted, int(_get_free_bytes(device) * MEMORY_SHARE[device.type]))


def _check_memory(memory_bytes: int, device: torch.device) -> None:
    free = _get_free_bytes(device)
    if memory_bytes > free:
        raise ModelError(
            f"kv_cache_memory_bytes={memory_bytes} is more than the {free} bytes free on {device}"
        )


def _get_free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # counts what the page cache would give back
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


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
