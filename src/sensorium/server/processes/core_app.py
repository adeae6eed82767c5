"""Builds the core and its loop from the parent's first message."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sensorium.engine.assembly.builder import Core, build_core, try_core, use_tiers
from sensorium.engine.assembly.config import make_scheduler
from sensorium.engine.assembly.frontend import (
    Checkpoint,
    build_caches,
    build_frontend,
    build_receiver,
    read_checkpoint,
)
from sensorium.engine.assembly.memory import format_bytes
from sensorium.engine.assembly.options import LoadingOptions
from sensorium.engine.assembly.tiers import build_tiers
from sensorium.engine.core_process import CoreInfo
from sensorium.engine.core_process.core_loop import CoreLoop
from sensorium.engine.core_process.rehearsal import Rehearsal
from sensorium.models.checkpoint import blame_checkpoint
from sensorium.multimodal.cache.mirror import MirrorReceiver
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.tiers.tiers import MediaTiers
from sensorium.server.logs import adopt_library_logs
from sensorium.server.metrics.core import CoreMetrics
from sensorium.server.metrics.shared_files import CORE, write_as
from sensorium.server.options import ServeOptions
from sensorium.server.processes.control import StartCore
from sensorium.server.processes.shared_resources import Pulse, get_idle_interval
from sensorium.types.families import FAMILIES
from sensorium.types.restrictions import Restrictions
from sensorium.utils.process import listen_for_long_work


def build_core_app(start: StartCore) -> tuple[CoreLoop, CoreInfo, MediaTiers | None]:
    """Load the model, and return the core's main loop, its description and its tiers.

    The tiers, if there are any, must be closed when the loop has ended. Raise a `SensoriumError` if
    the model can't be loaded.
    """
    adopt_library_logs()
    options = start.options
    # Progress bars would break lines of JSON.
    loading = replace(options.loading, use_tqdm_on_load=options.log_format == "text")
    with blame_checkpoint(options.model):
        checkpoint = read_checkpoint(loading)
        tiers = build_tiers(loading, checkpoint.directory, checkpoint.hf_config, options.media)
        store = None if start.shm_fd is None else ShmStore.attach(start.shm_fd)
        receiver = build_receiver(store)
        built = build_core(
            loading, checkpoint, options=options.engine, receiver=receiver, has_own_process=True
        )
        restrictions = Restrictions()
        if built.needs_trial:
            restrictions = _try_core(built, loading, checkpoint, options)
        use_tiers(built, tiers)
        mirror = receiver if isinstance(receiver, MirrorReceiver) else None
        info = CoreInfo(
            endpoint=start.endpoint,
            max_model_len=built.config.limits.max_model_len,
            defaults=built.defaults,
            epoch=mirror.epoch if mirror is not None and options.media.capacity_bytes else None,
            description=(
                *describe_core(built, options, model_type=checkpoint.hf_config.model_type),
                *(("switched off", f"{m}: {why}") for m, why in restrictions.switched_off.items()),
                *(("one a prompt", f"{m}: {why}") for m, why in restrictions.only_one.items()),
            ),
            kernels={
                "attention": built.config.attention_backend,
                "cuda_graphs": built.config.graphs,
                "fused": built.config.fused,
            },
            restrictions=restrictions,
        )
    return _make_loop(start, built), info, tiers


def _make_loop(start: StartCore, built: Core) -> CoreLoop:
    """Return the main loop of a core, which writes metrics and, if it is watched, signs of life."""
    write_as(CORE)
    metrics = CoreMetrics(start.options.model_names[0])
    metrics.sync(built.core)
    # A core that replaces another is warmed by the requests that wait for it.
    rehearse = (
        None if start.life > 1 else Rehearsal(built.core, partial(make_scheduler, built.config))
    )
    make_loop = partial(
        CoreLoop, built.core, start.endpoint, rehearse=rehearse, on_step=metrics.on_step
    )
    if start.pulse_fd is None:
        return make_loop()
    pulse = Pulse.attach(start.pulse_fd)
    built.hf_model.call_before_blocks(pulse.beat)
    listen_for_long_work(pulse.note_long_work)
    pulse.beat()  # from now on the parent watches the signs of life
    idle_s = get_idle_interval(start.options.core_stall_timeout)
    return make_loop(on_progress=pulse.beat, idle_s=idle_s)


def _try_core(
    built: Core, loading: LoadingOptions, checkpoint: Checkpoint, options: ServeOptions
) -> Restrictions:
    """Compare the engine with the model in Transformers, and return its restrictions.

    Raise a `ModelError` if the model can't be used at all.
    """
    # The trial has a frontend of its own, which shares no cache with others.
    alone = replace(
        options.media,
        mm_processor_cache_type="lru",
        mm_processor_pool_size=0,
        mm_disk_cache=None,
        mm_remote_cache=None,
        encoder=None,
    )
    frontend = build_frontend(loading, checkpoint, alone, build_caches(alone, None))
    restrictions = try_core(built, frontend, options.engine.limit_mm_per_prompt)
    frontend.media_parts.close()
    return restrictions


def describe_core(
    built: Core, options: ServeOptions, *, model_type: str
) -> tuple[tuple[str, str], ...]:
    """Return the names and values that a server prints about its engine when it starts.

    `model_type` is the type of the model in the checkpoint's configuration, as in "gemma3".
    """
    config, limits = built.config, built.config.limits
    names = {family.model_type: family.name for family in FAMILIES}
    dtype = str(built.hf_model.dtype).removeprefix("torch.")
    rows = [
        ("model", options.model_label),
        ("family", names.get(model_type, f"{model_type} (unknown; passed its trial)")),
        ("device", f"{built.hf_model.device}, {dtype}, attention by {config.attention_backend}"),
        ("CUDA graphs", config.graphs),
        ("fused", config.fused),
        ("context", f"{limits.max_model_len} tokens"),
        ("KV cache", _describe_kv_cache(built)),
        ("prefix caching", "on" if config.enable_prefix_caching else "off"),
        (
            "a step",
            f"{limits.max_num_seqs} requests and {limits.max_num_batched_tokens} tokens at most",
        ),
    ]
    if config.memory.encoder_cache_bytes:
        size = format_bytes(config.memory.encoder_cache_bytes)
        rows.append(("encoder cache", f"{limits.encoder_cache_size} embeddings, {size}"))
    return tuple(rows)


def _describe_kv_cache(built: Core) -> str:
    """Return the size of the KV cache in words: the blocks of each group, its tokens and bytes."""
    config = built.config
    if not config.groups:
        return "none"
    # The first block of a group is never used.
    counts = [group.num_blocks - 1 for group in config.groups]
    # All layers have room for so many tokens. Layers with a window keep only the last of them.
    whole = [group.num_blocks - 1 for group in config.groups if group.window is None]
    tokens = f", {min(whole) * config.block_size} tokens" if whole else ""
    size = format_bytes(config.memory.kv_cache_bytes)
    return f"{' + '.join(map(str, counts))} blocks of {config.block_size}{tokens}, {size}"
