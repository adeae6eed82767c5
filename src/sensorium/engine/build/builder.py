"""Builds an engine: loads the model, finds its layout, plans the memory, connects the parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from sensorium.core.admission import Limits
from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.scheduler import Scheduler
from sensorium.engine.build.config import (
    EngineConfig,
    limit_context,
    resolve_config,
    resolve_limits,
)
from sensorium.engine.build.memory import MemoryPlan, check_memory, get_free_bytes, plan_memory
from sensorium.engine.build.options import EngineOptions, LoadingOptions, MediaOptions
from sensorium.engine.build.perception import (
    Caches,
    Perception,
    build_caches,
    build_perception,
    build_receiver,
    build_store,
)
from sensorium.engine.build.trial import Trial
from sensorium.engine.core_process.engine_core import EngineCore, PayloadStore
from sensorium.engine.inputs.switched_off import log_switched_off
from sensorium.grammar.compiler import GrammarCompiler
from sensorium.layers.attention.selection import choose_attention
from sensorium.layers.kv_layout import LayerGroup, group_layers
from sensorium.models.adapter import ModelAdapter
from sensorium.models.checkpoint import (
    find_checkpoint,
    find_weights,
    get_num_weight_bytes,
    get_revision,
)
from sensorium.models.families import ADAPTERS
from sensorium.models.generation_config import get_generation_defaults, load_string_limit
from sensorium.models.loading import (
    get_model_class,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from sensorium.multimodal.cache.interface import ReceiverCache
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.families import FAMILIES
from sensorium.types.sampling import GenerationDefaults
from sensorium.utils.process import report_step
from sensorium.worker.graphs.building import GraphOptions, build_graphs
from sensorium.worker.kv_cache import KVCache
from sensorium.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on this machine, with its config. Its weights are read by the core only."""

    directory: Path
    hf_config: PretrainedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The part of an engine that computes."""

    core: EngineCore
    grammars: GrammarCompiler  # compiles the grammars of structured outputs
    config: EngineConfig
    adapter: ModelAdapter
    generation_config: str
    needs_trial: bool  # whether the model is of an unknown family, and has to pass `try_core`

    @property
    def defaults(self) -> GenerationDefaults:
        """Return the sampling defaults for requests."""
        return get_generation_defaults(self.adapter.model, self.generation_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """The part of an engine that turns prompts into requests."""

    processor: MultiModalProcessor
    perception: Perception


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A core and its frontend in one process."""

    core: EngineCore
    grammars: GrammarCompiler
    config: EngineConfig
    processor: MultiModalProcessor
    perception: Perception
    defaults: GenerationDefaults
    switched_off: Mapping[str, str]  # modality -> why it can't be used


def build_engine(loading: LoadingOptions, *, options: EngineOptions, media: MediaOptions) -> Engine:
    """Build a core and its frontend, and try a model of an unknown family."""
    checkpoint = read_checkpoint(loading)
    store = build_store(media)
    receiver = build_receiver(store)
    built = build_core(
        loading,
        checkpoint,
        options=options,
        receiver=receiver,
        # Called for the first grammar, when `frontend` exists.
        get_tokenizer=lambda: frontend.processor.tokenizer,
    )
    frontend = build_frontend(loading, checkpoint, media, build_caches(media, store, receiver))
    switched_off = {}
    if built.needs_trial:
        switched_off = try_core(built, frontend, options.limit_mm_per_prompt)
    logger.info("media: %s", media)
    return Engine(
        core=built.core,
        grammars=built.grammars,
        config=built.config,
        processor=frontend.processor,
        perception=frontend.perception,
        defaults=built.defaults,
        switched_off=switched_off,
    )


def read_checkpoint(loading: LoadingOptions) -> Checkpoint:
    """Find a checkpoint, or fetch its small files, and read its config."""
    report_step("reading the checkpoint")
    directory = find_checkpoint(
        loading.model,
        revision=loading.revision,
        trust_remote_code=loading.trust_remote_code,
        use_tqdm=loading.use_tqdm_on_load,
    )
    hf_config = load_config(str(directory), trust_remote_code=loading.trust_remote_code)
    return Checkpoint(directory=directory, hf_config=hf_config)


def build_core(
    loading: LoadingOptions,
    checkpoint: Checkpoint,
    *,
    options: EngineOptions,
    receiver: ReceiverCache,
    get_tokenizer: Callable[[], Any] | None = None,
) -> Core:
    """Load the model and build the part of an engine that computes.

    `get_tokenizer` returns a tokenizer that is already loaded. Without it, the checkpoint's
    tokenizer is loaded for the first request that has a grammar.
    """
    hf_config, trust_remote_code = checkpoint.hf_config, loading.trust_remote_code
    directory = str(checkpoint.directory)
    device = resolve_device(loading.device)
    dtype = resolve_dtype(loading.dtype, hf_config, device)
    get_model_class(directory, hf_config, trust_remote_code=trust_remote_code)
    text_config = hf_config.get_text_config(decoder=True)
    limits = resolve_limits(options, text_config=text_config, device=device)
    use_tqdm = loading.use_tqdm_on_load
    weights = find_weights(loading.model, checkpoint.directory, use_tqdm=use_tqdm)
    memory = _plan_memory(weights, hf_config, options, limits, dtype.itemsize, device)
    free_bytes = get_free_bytes(device, options.gpu_memory_utilization)
    check_memory(memory, free_bytes=free_bytes, device=device)
    report_step("loading the weights")
    adapter = load_model(
        directory,
        hf_config,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        use_tqdm=use_tqdm,
    )
    load = partial(load_tokenizer, directory, trust_remote_code=trust_remote_code)
    grammars = _make_grammars(adapter, options, checkpoint, get_tokenizer or load)
    report_step("preparing the engine")
    core, config = build_engine_core(
        adapter,
        options,
        receiver=receiver,
        grammars=grammars,
        limits=limits,
        memory=memory,
        # The system counts memory of weights that are mapped from their files as free.
        most_bytes=free_bytes - memory.weights_bytes,
        use_tqdm=use_tqdm,
    )
    logger.info("model %s on %s, %s: %s", loading.model, device, dtype, config)
    return Core(
        core=core,
        grammars=grammars,
        config=config,
        adapter=adapter,
        generation_config=options.generation_config,
        needs_trial=hf_config.model_type not in ADAPTERS,
    )


def _make_grammars(
    adapter: ModelAdapter,
    options: EngineOptions,
    checkpoint: Checkpoint,
    get_tokenizer: Callable[[], Any],
) -> GrammarCompiler:
    return GrammarCompiler(
        get_tokenizer,
        vocab_size=adapter.vocab_size,
        eos_token_ids=get_generation_defaults(
            adapter.model, options.generation_config
        ).eos_token_ids,
        max_string_length=resolve_string_limit(options, checkpoint),
    )


def resolve_string_limit(options: EngineOptions, checkpoint: Checkpoint) -> int | None:
    """Return a limit for strings that have none in their schema, or `None` if there is no limit."""
    asked = options.structured_string_limit
    return load_string_limit(str(checkpoint.directory)) if asked is None else asked or None


def build_frontend(
    loading: LoadingOptions,
    checkpoint: Checkpoint,
    media: MediaOptions,
    caches: Caches,
    *,
    starts_early: bool = False,
    warm_modalities: Collection[str] = (),
) -> Frontend:
    """Build the part of an engine that turns prompts into requests.

    `starts_early` and `warm_modalities` are those of `build_perception`.
    """
    report_step("loading the processor")
    directory, hf_config = str(checkpoint.directory), checkpoint.hf_config
    embeds = {family.model_type: family.embeds for family in FAMILIES}
    embeds_modalities = embeds.get(hf_config.model_type, ())
    processor = MultiModalProcessor(
        directory,
        hf_config,
        limits=media.get_limits(),
        trust_remote_code=loading.trust_remote_code,
    )
    perception = build_perception(
        media,
        caches,
        processor,
        directory=directory,
        model_revision=get_revision(checkpoint.directory),
        trust_remote_code=loading.trust_remote_code,
        embeds_modalities=embeds_modalities,
        embeds_width=hf_config.get_text_config(decoder=True).hidden_size
        if embeds_modalities
        else 0,
        starts_early=starts_early,
        warm_modalities=warm_modalities,
    )
    return Frontend(processor=processor, perception=perception)


def _plan_memory(
    weights: Sequence[Path],
    hf_config: PretrainedConfig,
    options: EngineOptions,
    limits: Limits,
    element_size: int,
    device: torch.device,
) -> MemoryPlan:
    return plan_memory(
        hf_config,
        limits=limits,
        weights_bytes=get_num_weight_bytes(weights, element_size=element_size),
        kv_cache_bytes=options.kv_cache_memory_bytes,
        # A context that the user did not ask for is cut to what fits, but one step must fit.
        num_kv_tokens=options.max_model_len
        or min(limits.max_model_len, limits.max_num_batched_tokens),
        element_size=element_size,
        has_graphs=device.type == "cuda" and not options.enforce_eager,
    )


def build_engine_core(
    adapter: ModelAdapter,
    options: EngineOptions,
    *,
    receiver: ReceiverCache,
    limits: Limits,
    memory: MemoryPlan,
    most_bytes: int,
    grammars: GrammarCompiler | None = None,
    use_tqdm: bool = False,
) -> tuple[EngineCore, EngineConfig]:
    """Build the scheduler and the worker around a loaded model."""
    layers = adapter.probe_layers()  # refuses models that can't be run
    if options.fusion and adapter.device.type == "cuda":
        adapter.fuse()
    limits = limit_context(options, limits, adapter.find_context_limit(layers))
    layer_groups = group_layers(layers)
    # Chosen before the memory is divided, because a backend may need some of it.
    attention = choose_attention(
        options.attention_backend,
        layers=layers,
        block_size=options.block_size,
        dtype=adapter.dtype,
        device=adapter.device,
    )
    config = resolve_config(
        options,
        limits=limits,
        layer_groups=layer_groups,
        element_size=adapter.dtype.itemsize,
        device=adapter.device,
        bidirectional_modalities=adapter.bidirectional_modalities,
        attention_backend=attention.name,
        memory=memory,
        long_after=adapter.long_after,
        free_bytes=min(most_bytes, get_free_bytes(adapter.device, options.gpu_memory_utilization)),
    )
    payloads = PayloadStore(receiver)
    kv_cache = _make_kv_cache(adapter, layer_groups, config)
    graphs = build_graphs(
        adapter,
        _make_graph_options(options, config.limits, use_tqdm=use_tqdm),
        layers=layers,
        kv_cache=kv_cache,
        groups=config.groups,
        block_size=config.block_size,
    )
    config = replace(config, graphs=graphs.words, fused=_describe_fusion(adapter, options))
    runner = ModelRunner(
        adapter,
        kv_cache=kv_cache,
        groups=config.groups,
        block_size=config.block_size,
        attention=attention,
        payloads=payloads,
        grammars=grammars,
        graphs=graphs,
    )
    return EngineCore(_make_scheduler(config), runner, payloads), config


def _describe_fusion(adapter: ModelAdapter, options: EngineOptions) -> str:
    """Return what is fused in the model, or why nothing is."""
    if not options.fusion:
        return "nothing: fusion is turned off"
    if adapter.device.type != "cuda":
        return f"nothing: the kernels need a CUDA device, not {adapter.device.type}"
    return str(adapter.fusion)


def _make_kv_cache(
    adapter: ModelAdapter, layer_groups: Sequence[LayerGroup], config: EngineConfig
) -> KVCache:
    return KVCache(
        layer_groups,
        config.groups,
        block_size=config.block_size,
        dtype=adapter.dtype,
        device=adapter.device,
    )


def _make_graph_options(options: EngineOptions, limits: Limits, *, use_tqdm: bool) -> GraphOptions:
    return GraphOptions(
        enforce_eager=options.enforce_eager,
        sizes=options.cuda_graph_sizes,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        use_tqdm=use_tqdm,
    )


def _make_scheduler(config: EngineConfig) -> Scheduler:
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


def try_core(
    built: Core, frontend: Frontend, limit_mm_per_prompt: Mapping[str, int]
) -> dict[str, str]:
    """Compare a core with its model, and return why modalities can't be used.

    The result maps a modality to a reason. Raises a `ModelError` if the model can't be used at all.
    Neither the core nor the frontend keeps anything of the trial.
    """
    report_step("comparing the engine with the model, which is of an unknown family")
    pipeline = frontend.perception.readonly.for_warmup()
    trial = Trial(
        built.core,
        built.adapter,
        frontend.processor,
        pipeline,
        config=built.config,
        make_scheduler=_make_scheduler,
        limit_mm_per_prompt=limit_mm_per_prompt,
    )
    try:
        faults = trial.run()
    except BaseException:
        frontend.perception.close()
        raise
    finally:
        pipeline.loader.close()
    for modality, reason in faults.items():
        log_switched_off(modality, reason)
    return faults
