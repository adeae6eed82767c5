"""Puts an engine core together: loads the model, learns its layout, plans the memory, connects
the parts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.scheduler import Scheduler
from sensorium.engine.config import EngineConfig, EngineOptions, resolve_config
from sensorium.engine.engine_core import EngineCore
from sensorium.engine.payload_store import PayloadStore
from sensorium.layers.attention.selection import choose_attention
from sensorium.layers.kv_layout import group_layers
from sensorium.models.adapter import ModelAdapter
from sensorium.models.generation_config import get_generation_defaults
from sensorium.models.loading import load_config, load_model, resolve_device, resolve_dtype
from sensorium.multimodal.processor import MultiModalProcessor
from sensorium.types.sampling import GenerationDefaults
from sensorium.worker.kv_cache import KVCache
from sensorium.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What a frontend needs of an engine in its own process."""

    core: EngineCore
    config: EngineConfig
    processor: MultiModalProcessor
    defaults: GenerationDefaults


def build_engine(model: str, *, dtype: str, device: str, options: EngineOptions) -> Engine:
    hf_config = load_config(model)
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, hf_config, torch_device)
    adapter = load_model(model, hf_config, dtype=torch_dtype, device=torch_device)
    core, config = build_engine_core(adapter, options)
    logger.info("model %s on %s, %s: %s", model, torch_device, torch_dtype, config)
    return Engine(
        core=core,
        config=config,
        processor=MultiModalProcessor(model, hf_config),
        defaults=get_generation_defaults(adapter.model),
    )


def build_engine_core(
    adapter: ModelAdapter, options: EngineOptions
) -> tuple[EngineCore, EngineConfig]:
    layers = adapter.probe_layers()
    layer_groups = group_layers(layers)
    # Before the memory is divided: a backend may need some of its own.
    attention = choose_attention(
        options.attention_backend,
        layers=layers,
        block_size=options.block_size,
        dtype=adapter.dtype,
        device=adapter.device,
    )
    config = resolve_config(
        options,
        text_config=adapter.text_config,
        layer_groups=layer_groups,
        dtype=adapter.dtype,
        device=adapter.device,
        bidirectional_modalities=adapter.bidirectional_modalities,
        attention_backend=attention.name,
    )
    payloads = PayloadStore()
    runner = ModelRunner(
        adapter,
        kv_cache=KVCache(
            layer_groups,
            config.groups,
            block_size=config.block_size,
            dtype=adapter.dtype,
            device=adapter.device,
        ),
        groups=config.groups,
        block_size=config.block_size,
        attention=attention,
        payloads=payloads,
    )
    scheduler = Scheduler(
        config.limits,
        kv_cache=KVCacheManager(
            config.groups,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        encoder_cache=EncoderCacheManager(config.limits.encoder_cache_size),
        policy=config.scheduling_policy,
    )
    return EngineCore(scheduler, runner, payloads), config
