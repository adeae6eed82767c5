"""Builds an engine: plans the memory, loads the model, groups its layers, connects the parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sensorium.checkpoints.safetensors_header import get_num_weight_bytes
from sensorium.core.admission import Limits
from sensorium.engine.assembly.config import (
    OVERLAP_DEVICES,
    EngineConfig,
    limit_context,
    make_scheduler,
    resolve_config,
    resolve_limits,
)
from sensorium.engine.assembly.frontend import (
    Checkpoint,
    Frontend,
    build_caches,
    build_frontend,
    build_receiver,
    build_store,
    read_checkpoint,
)
from sensorium.engine.assembly.memory import MemoryPlan, check_memory, get_free_bytes, plan_memory
from sensorium.engine.assembly.options import EngineOptions, LoadingOptions, MediaOptions
from sensorium.engine.assembly.tiers import build_tiers
from sensorium.engine.assembly.trial import Trial
from sensorium.engine.core_process.engine_core import EngineCore, PayloadStore
from sensorium.engine.core_process.output_loader import OutputLoader
from sensorium.engine.inputs.switched_off import log_restrictions
from sensorium.grammar.compiler import GrammarCompiler
from sensorium.layers.attention.selection import choose_attention
from sensorium.layers.kv_layout import LayerSpec, group_layers
from sensorium.models.checkpoint import find_weights
from sensorium.models.ctc_transducer import CtcTransducerModel
from sensorium.models.families import KNOWN_MODELS
from sensorium.models.generation_config import get_generation_defaults, load_string_limit
from sensorium.models.hf_model import HfModel
from sensorium.models.loading import (
    get_model_class,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from sensorium.models.streaming import StreamingModel
from sensorium.multimodal.cache.interface import ReceiverCache
from sensorium.multimodal.tiers.tiers import MediaTiers
from sensorium.types.restrictions import Restrictions
from sensorium.types.sampling import GenerationDefaults
from sensorium.utils.process import report_step
from sensorium.worker.ctc_transducer_runner import CtcTransducerRunner
from sensorium.worker.graphs.building import GraphOptions, Graphs, build_graphs
from sensorium.worker.kv_cache import KVCache
from sensorium.worker.model_runner import ModelRunner
from sensorium.worker.streaming_runner import StreamingRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The part of an engine that computes, with its final config and its model."""

    core: EngineCore
    grammars: GrammarCompiler  # compiles the grammars of structured outputs
    config: EngineConfig
    hf_model: HfModel
    defaults: GenerationDefaults  # the sampling defaults for requests
    needs_trial: bool  # the model is of an unknown family, and has to pass `try_core`


def build_engine(
    loading: LoadingOptions, *, options: EngineOptions, media: MediaOptions
) -> tuple[Core, Frontend, Restrictions]:
    """Build a core and its frontend in this process, for the checkpoint that `loading` names.

    A model of an unknown family (architecture) is first compared with its own Transformers code
    (`try_core`), and the restrictions that this finds are also returned. Raise a `ModelError` if
    the model can't be run.
    """
    checkpoint = read_checkpoint(loading)
    tiers = build_tiers(loading, checkpoint.directory, checkpoint.hf_config, media)
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
    caches = build_caches(media, store, receiver)
    frontend = build_frontend(loading, checkpoint, media, caches, tiers=tiers)
    restrictions = Restrictions()
    if built.needs_trial:
        restrictions = try_core(built, frontend, options.limit_mm_per_prompt)
    use_tiers(built, tiers)
    logger.info("media: %s", media)
    return built, frontend, restrictions


def use_tiers(built: Core, tiers: MediaTiers | None) -> None:
    """Let a core keep its encoder outputs in the tiers, and find them there.

    Call this after the core's trial, in which the core has to encode the items itself.
    """
    if tiers is not None and built.hf_model.kind.has_kept_encodings:
        built.core.runner.encoder_runner.store = tiers
        built.core.loader = OutputLoader(tiers)


def build_core(
    loading: LoadingOptions,
    checkpoint: Checkpoint,
    *,
    options: EngineOptions,
    receiver: ReceiverCache,
    get_tokenizer: Callable[[], Any] | None = None,
    has_own_process: bool = False,
) -> Core:
    """Load the model's weights, and build the computing part of an engine.

    Without `get_tokenizer` a tokenizer is loaded for the first request with a grammar. With
    `has_own_process` nothing else in the process uses the device. Raise a `ModelError` if the model
    can't be run.
    """
    hf_config, trust_remote_code = checkpoint.hf_config, loading.trust_remote_code
    directory = str(checkpoint.directory)
    device = resolve_device(loading.device)
    dtype = resolve_dtype(loading.dtype, hf_config, device)
    get_model_class(directory, hf_config, trust_remote_code=trust_remote_code)
    text_config = hf_config.get_text_config(decoder=True)
    limits = resolve_limits(options, text_config=text_config, kind=checkpoint.kind, device=device)
    parts = (checkpoint, options, limits, dtype, device)
    memory, most_bytes = _plan_memory(loading, *parts, captures_encoders=has_own_process)
    report_step("loading the weights")
    hf_model = load_model(
        directory,
        hf_config,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        use_tqdm=loading.use_tqdm_on_load,
    )
    defaults = get_generation_defaults(hf_model.model, options.generation_config)
    grammars = GrammarCompiler(
        get_tokenizer or partial(load_tokenizer, directory, trust_remote_code=trust_remote_code),
        vocab_size=hf_model.vocab_size,
        eos_token_ids=defaults.eos_token_ids,
        max_string_length=resolve_string_limit(options, checkpoint),
    )
    report_step("preparing the engine")
    core, config = build_engine_core(
        hf_model,
        options,
        receiver=receiver,
        grammars=grammars,
        limits=limits,
        memory=memory,
        most_bytes=most_bytes,
        use_tqdm=loading.use_tqdm_on_load,
    )
    logger.info("model %s on %s, %s: %s", loading.model, device, dtype, config)
    return Core(
        core=core,
        grammars=grammars,
        config=config,
        hf_model=hf_model,
        defaults=defaults,
        needs_trial=_needs_trial(checkpoint),
    )


def _needs_trial(checkpoint: Checkpoint) -> bool:
    """Return whether a model has to be compared with its Transformers code before it is used.

    A CTC/transducer model is run by that code alone, so that there is nothing to compare.
    """
    is_known = checkpoint.hf_config.model_type in KNOWN_MODELS
    return not is_known and checkpoint.kind.decoder != "none"


def _plan_memory(
    loading: LoadingOptions,
    checkpoint: Checkpoint,
    options: EngineOptions,
    limits: Limits,
    dtype: torch.dtype,
    device: torch.device,
    *,
    captures_encoders: bool,
) -> tuple[MemoryPlan, int]:
    """Return an engine's memory plan, and how many bytes it may use in addition to the weights."""
    weights = find_weights(loading.model, checkpoint.directory, use_tqdm=loading.use_tqdm_on_load)
    memory = plan_memory(
        checkpoint.hf_config,
        options,
        kind=checkpoint.kind,
        limits=limits,
        weights_bytes=get_num_weight_bytes(weights, element_size=dtype.itemsize),
        element_size=dtype.itemsize,
        device=device,
        captures_encoders=captures_encoders,
    )
    free_bytes = get_free_bytes(device, options.gpu_memory_utilization)
    check_memory(memory, free_bytes=free_bytes, device=device)
    # The system counts memory of weights that are mapped from their files as free.
    return memory, free_bytes - memory.weights_bytes


def resolve_string_limit(options: EngineOptions, checkpoint: Checkpoint) -> int | None:
    """Return the most characters that a string may have if a JSON schema sets no limit.

    This is the option `structured_string_limit`, or else the value in the model's
    generation_config.json. `None` means that there is no limit.
    """
    asked = options.structured_string_limit
    return load_string_limit(str(checkpoint.directory)) if asked is None else asked or None


def build_engine_core(
    hf_model: HfModel,
    options: EngineOptions,
    *,
    receiver: ReceiverCache,
    limits: Limits,
    memory: MemoryPlan,  # as planned before the model was loaded
    most_bytes: int,  # that the engine may use in addition to the weights
    grammars: GrammarCompiler | None = None,
    use_tqdm: bool = False,
) -> tuple[EngineCore, EngineConfig]:
    """Build the scheduler, KV cache and worker of a loaded model within `most_bytes` of memory."""
    if isinstance(hf_model, CtcTransducerModel):
        return _build_ctc_transducer(hf_model, options, receiver, limits, memory)
    layers = hf_model.probe_layers()  # refuses models that can't be run
    if options.fusion and hf_model.device.type == "cuda":
        hf_model.fuse()
    limits = _limit_model(hf_model, options, limits, layers)
    layer_groups = group_layers(layers)
    # Chosen before the memory is divided, because a backend may need some of it.
    attention = choose_attention(
        options.attention_backend,
        layers=layers,
        block_size=options.block_size,
        dtype=hf_model.dtype,
        device=hf_model.device,
    )
    config = resolve_config(
        options,
        limits=limits,
        layer_groups=layer_groups,
        element_size=hf_model.dtype.itemsize,
        device=hf_model.device,
        attention_backend=attention.name,
        max_cross_positions=hf_model.max_cross_positions,
        memory=memory,
        free_bytes=min(most_bytes, get_free_bytes(hf_model.device, options.gpu_memory_utilization)),
    )
    payloads = PayloadStore(receiver)
    kv_cache = KVCache(
        layer_groups,
        config.groups,
        block_size=config.block_size,
        dtype=hf_model.dtype,
        device=hf_model.device,
    )
    graphs = _build_graphs(hf_model, options, config, layers, kv_cache, memory, use_tqdm)
    config = replace(config, graphs=graphs.words, fused=_describe_fusion(hf_model, options))
    make_runner = StreamingRunner if isinstance(hf_model, StreamingModel) else ModelRunner
    runner = make_runner(
        hf_model,  # type: ignore[arg-type]
        kv_cache=kv_cache,
        groups=config.groups,
        block_size=config.block_size,
        attention=attention,
        payloads=payloads,
        grammars=grammars,
        graphs=graphs,
    )
    return EngineCore(make_scheduler(config), runner, payloads, overlap=config.overlap), config


def _build_ctc_transducer(
    hf_model: CtcTransducerModel,
    options: EngineOptions,
    receiver: ReceiverCache,
    limits: Limits,
    memory: MemoryPlan,
) -> tuple[EngineCore, EngineConfig]:
    """Build the scheduler and the worker of a model that keeps no keys and values."""
    config = EngineConfig(
        limits=replace(limits, is_encoder_decoder=True),
        groups=(),
        block_size=options.block_size,
        enable_prefix_caching=False,
        scheduling_policy=options.scheduling_policy,
        attention_backend=hf_model.own_attention_name,
        memory=memory,
        overlap=options.overlap and hf_model.device.type in OVERLAP_DEVICES,
        graphs="none: the model has no decoder",
        fused="nothing: the model has no decoder",
    )
    payloads = PayloadStore(receiver)
    runner = CtcTransducerRunner(hf_model, block_size=config.block_size, payloads=payloads)
    return EngineCore(make_scheduler(config), runner, payloads, overlap=config.overlap), config


def _limit_model(
    hf_model: HfModel, options: EngineOptions, limits: Limits, layers: Sequence[LayerSpec]
) -> Limits:
    """Return an engine's limits, completed with those that only the loaded model has."""
    return replace(
        limit_context(options, limits, hf_model.find_context_limit(layers)),
        bidirectional_modalities=hf_model.bidirectional_modalities,
        long_after=hf_model.long_after,
        is_encoder_decoder=hf_model.kind.media == "outside",
    )


def _describe_fusion(hf_model: HfModel, options: EngineOptions) -> str:
    if not options.fusion:
        return "nothing: fusion is turned off"
    if hf_model.device.type != "cuda":
        return f"nothing: the kernels need a CUDA device, not {hf_model.device.type}"
    return str(hf_model.fusion)


def _build_graphs(
    hf_model: HfModel,
    options: EngineOptions,
    config: EngineConfig,
    layers: Sequence[LayerSpec],
    kv_cache: KVCache,
    memory: MemoryPlan,
    use_tqdm: bool,
) -> Graphs:
    graph_options = GraphOptions(
        enforce_eager=options.enforce_eager,
        sizes=options.cuda_graph_sizes,
        max_num_seqs=config.limits.max_num_seqs,
        max_num_batched_tokens=config.limits.max_num_batched_tokens,
        max_model_len=config.limits.max_model_len,
        use_tqdm=use_tqdm,
        encoder_bytes=memory.encoder_graph_bytes,
    )
    return build_graphs(
        hf_model,
        graph_options,
        layers=layers,
        kv_cache=kv_cache,
        groups=config.groups,
        block_size=config.block_size,
    )


def try_core(
    built: Core, frontend: Frontend, limit_mm_per_prompt: Mapping[str, int]
) -> Restrictions:
    """Compare a core with the model's own code, and return (and log) the modalities that differ.

    Raise a `ModelError` if even text differs; the frontend's media processes and threads are closed
    then. Caches and counters do not change.
    """
    report_step("comparing the engine with the model, which is of an unknown family")
    pipeline = frontend.media_parts.readonly.for_warmup()
    trial = Trial(
        built.core,
        built.hf_model,
        frontend.processor,
        pipeline,
        config=built.config,
        limit_mm_per_prompt=limit_mm_per_prompt,
    )
    try:
        restrictions = trial.run()
    except BaseException:
        frontend.media_parts.close()
        raise
    finally:
        pipeline.loader.close()
    log_restrictions(restrictions)
    return restrictions
