"""Builds the part of an engine that turns prompts into requests, with its media caches."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
from transformers import PretrainedConfig

from sensorium.engine.assembly.options import LoadingOptions, MediaOptions
from sensorium.engine.assembly.tiers import make_identity
from sensorium.engine.encoding.client import SocketEncoder
from sensorium.engine.encoding.wire import Identity
from sensorium.models.checkpoint import find_checkpoint, get_revision
from sensorium.models.families import find_model_class
from sensorium.models.loading import load_config
from sensorium.multimodal.cache.interface import ProcessorCache, ReceiverCache, SenderCache
from sensorium.multimodal.cache.item_table import ItemTable
from sensorium.multimodal.cache.mirror import UNKNOWN_EPOCH, MirrorReceiver, MirrorSender
from sensorium.multimodal.cache.shm import SharedReadonlyCache, ShmReceiver, ShmSender
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.fetching.loader import MediaLoader
from sensorium.multimodal.names import (
    MediaHasher,
    SharedUuidBindings,
    UuidBindings,
    choose_algorithm,
)
from sensorium.multimodal.pipeline import MediaPipeline
from sensorium.multimodal.pool.pool import ProcessPool
from sensorium.multimodal.processing.cost_guard import OwnOptions
from sensorium.multimodal.processing.item_backend import (
    EARLY_COST_S,
    EarlyBackend,
    EmbedsBackend,
    InProcessBackend,
    ItemBackend,
    PoolBackend,
    PoolSettings,
    encode_plain,
)
from sensorium.multimodal.processing.item_spec import StoredItems
from sensorium.multimodal.processing.item_worker import ItemWorker
from sensorium.multimodal.processing.layouts import SizeLayouts, has_sized_images
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.multimodal.processing.remote_encoder_backend import (
    EncoderService,
    RemoteEncoderBackend,
)
from sensorium.multimodal.tiers.tiers import MediaTiers
from sensorium.types.errors import ModelError
from sensorium.types.families import FAMILIES
from sensorium.types.model_kind import ModelKind
from sensorium.utils.process import report_step

MakeEncoder = Callable[[Identity, MultiModalProcessor], EncoderService]
_HANDLER = "sensorium.multimodal.processing.item_backend:make_handler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model's checkpoint directory on this machine, and the config that was read from it."""

    directory: Path  # maybe without the weights, which only the core reads and downloads
    hf_config: PretrainedConfig
    kind: ModelKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """The caches of processed media that one frontend uses."""

    sender: SenderCache  # for requests that go to the core
    readonly: ProcessorCache  # for requests that this engine does not run
    store: ShmStore | None = None  # None: each process keeps media in its own memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEncoder:
    """A connection to a remote encoder, with the backend that sends items to it."""

    service: EncoderService
    backend: RemoteEncoderBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaParts:
    """The parts of a frontend that fetch, decode and process media, with their caches."""

    caches: Caches
    pipeline: MediaPipeline  # for requests that go to the core
    readonly: MediaPipeline  # for requests that this engine only renders
    loader: MediaLoader
    pool: ProcessPool | None  # None: this process decodes and processes media itself
    tiers: MediaTiers | None = None  # None: nothing outlives the engine
    remote_encoder: RemoteEncoder | None = None  # None: the engine encodes everything itself

    def close(self) -> None:
        """Close all parts and the shared memory; the tiers first write the items that wait."""
        self.loader.close()
        if self.remote_encoder is not None:
            # First, so that items that the closed service drops are not begun here.
            self.remote_encoder.backend.close()
            self.remote_encoder.service.close()
        if self.tiers is not None:
            self.tiers.close()
        if self.pool is not None:
            self.pool.close()
        if self.caches.store is not None:
            self.caches.store.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """The part of an engine that turns prompts with media into requests for the core."""

    processor: MultiModalProcessor
    media_parts: MediaParts
    checkpoint: Checkpoint
    own_options: OwnOptions  # the operator's options for the processor and the decoders


def read_checkpoint(loading: LoadingOptions) -> Checkpoint:
    """Find a model's checkpoint, and read its config, but not its weights.

    If the checkpoint is not on this machine, its small files are downloaded from the hub.
    """
    report_step("reading the checkpoint")
    directory = find_checkpoint(
        loading.model,
        revision=loading.revision,
        trust_remote_code=loading.trust_remote_code,
        use_tqdm=loading.use_tqdm_on_load,
    )
    hf_config = load_config(str(directory), trust_remote_code=loading.trust_remote_code)
    kind = find_model_class(hf_config).kind
    return Checkpoint(directory=directory, hf_config=hf_config, kind=kind)


def build_store(options: MediaOptions) -> ShmStore | None:
    """Create the shared memory for processed media, or return `None` if the options need none."""
    if not options.has_shared_memory:
        return None
    return ShmStore.create(
        capacity_bytes=options.capacity_bytes, max_object_bytes=options.max_object_bytes
    )


def build_receiver(store: ShmStore | None) -> ReceiverCache:
    """Return the core's side of the media cache: in shared memory (`store`), or else mirrored."""
    return MirrorReceiver() if store is None else ShmReceiver(store)


def build_caches(
    options: MediaOptions, store: ShmStore | None, receiver: ReceiverCache | None = None
) -> Caches:
    """Return the media caches of a frontend that sends requests to a core.

    `receiver` is the core's side of the cache, or `None` if the core runs in another process.
    """
    capacity = options.capacity_bytes
    if store is None:
        epoch = receiver.epoch if isinstance(receiver, MirrorReceiver) else UNKNOWN_EPOCH
        return Caches(sender=MirrorSender(capacity, epoch=epoch), readonly=ItemTable(capacity))
    readonly = SharedReadonlyCache(store, capacity)
    return Caches(sender=ShmSender(store), readonly=readonly, store=store)


def build_readonly_caches(options: MediaOptions) -> Caches:
    """Return the media caches of a frontend that only renders requests and has no core."""
    return Caches(sender=MirrorSender(0), readonly=ItemTable(options.capacity_bytes))


def build_frontend(
    loading: LoadingOptions,
    checkpoint: Checkpoint,
    options: MediaOptions,
    caches: Caches,
    *,
    tiers: MediaTiers | None = None,  # where items are kept that outlive the engine
    starts_early: bool = False,  # process cheap media items here until the pool is ready
    warm_modalities: Collection[str] = (),  # for which the pool's processes are warmed up
    make_encoder: MakeEncoder | None = None,  # connects to a remote encoder; None: see `options`
) -> Frontend:
    """Build the processor of a model, and all parts that fetch and process media for it."""
    report_step("loading the processor")
    limits, store, hf_config = options.get_limits(), caches.store, checkpoint.hf_config
    processor = MultiModalProcessor(
        str(checkpoint.directory),
        hf_config,
        limits=limits,
        trust_remote_code=loading.trust_remote_code,
    )
    hasher = _build_hasher(options, processor, get_revision(checkpoint.directory))
    loader = MediaLoader(limits)
    uuids = UuidBindings() if store is None else SharedUuidBindings(store, hasher)
    own = _get_own_options(options)
    pool = _build_pool(processor, loading, checkpoint, options, store, own, warm_modalities)
    worker = ItemWorker(processor, limits, None if options.allow_larger_media else own)
    make_backend = partial(_make_backend, worker, processor, pool, starts_early=starts_early)
    shared = caches.sender if isinstance(caches.sender, ShmSender) else None
    layouts = SizeLayouts(hasher=hasher, backend=make_backend(keep=False), limits=limits)
    check_stored = StoredItems(processor, worker.lock).check
    make_pipeline = partial(MediaPipeline, hasher=hasher, loader=loader, uuids=uuids, limits=limits)
    make_pipeline = partial(make_pipeline, tiers=tiers, check_stored=check_stored)
    take_embeds = _make_embeds_backend(options, processor, hf_config)
    backend = make_backend(keep=shared is not None)
    remote = _connect_encoder(loading, checkpoint, options, processor, backend, make_encoder)
    media_parts = MediaParts(
        caches=caches,
        pipeline=make_pipeline(
            cache=caches.sender,
            shared=shared,
            backend=take_embeds(backend if remote is None else remote.backend),
            own_backend=take_embeds(backend),
            # An item may wait as long as the timeout twice: until it is sent, and for its answer.
            remote_timeout_s=0.0 if remote is None else 2 * options.encoder_timeout,
            takes_encoded=checkpoint.kind.has_kept_encodings,
        ),
        readonly=make_pipeline(
            cache=caches.readonly,
            backend=take_embeds(make_backend(keep=False)),
            layouts=layouts if has_sized_images(processor) else None,
        ),
        loader=loader,
        pool=pool,
        tiers=tiers,
        remote_encoder=remote,
    )
    return Frontend(
        processor=processor, media_parts=media_parts, checkpoint=checkpoint, own_options=own
    )


def _make_backend(
    worker: ItemWorker,
    processor: MultiModalProcessor,
    pool: ProcessPool | None,
    *,
    starts_early: bool,
    keep: bool,
) -> ItemBackend:
    """Return the backend that processes items: the pool, or this process if there is no pool.

    With `starts_early`, this process also takes cheap items until the pool is ready.
    """
    if pool is None:
        return InProcessBackend(worker)
    late = PoolBackend(pool, processor, worker.limits, keep=keep)
    early = InProcessBackend(worker, max_cost_s=EARLY_COST_S)
    return EarlyBackend(pool, early, late) if starts_early else late


def _connect_encoder(
    loading: LoadingOptions,
    checkpoint: Checkpoint,
    options: MediaOptions,
    processor: MultiModalProcessor,
    local: ItemBackend,
    make_encoder: MakeEncoder | None,
) -> RemoteEncoder | None:
    """Return the remote encoder that the options or the caller name, or None if none is named.

    Raise a `ModelError` if the model can't have a remote encoder, or if the encoder at that address
    has other weights, versions or options.
    """
    if make_encoder is None:
        if options.encoder is None:
            return None
        make_encoder = partial(_connect_socket, options.encoder, timeout_s=options.encoder_timeout)
    check_remote_encoder(processor)
    identity = make_identity(loading, checkpoint.directory, checkpoint.hf_config, options)
    identity = msgspec.structs.replace(identity, processor=processor.fingerprint)
    service = make_encoder(identity, processor)
    backend = RemoteEncoderBackend(
        local, service, above=options.encode_above, has_fallback=options.encoder_fallback
    )
    return RemoteEncoder(service=service, backend=backend)


def _connect_socket(
    address: str, identity: Identity, processor: MultiModalProcessor, *, timeout_s: float
) -> EncoderService:
    service = SocketEncoder(address, identity, processor, timeout_s=timeout_s)
    try:
        service.check()
    except BaseException:
        service.close()
        raise
    return service


def check_remote_encoder(processor: MultiModalProcessor) -> None:
    """Raise a `ModelError` if a model has no encoder that can run without its decoder."""
    if not processor.modalities:
        raise ModelError("this model takes no media, so that there is nothing to encode")
    if processor.kind.media != "in_prompt":
        raise ModelError(
            "the encoder of this model can't be remote: it only transcribes speech, and encodes "
            "parts of the audio while it does"
        )


def _make_embeds_backend(
    options: MediaOptions, processor: MultiModalProcessor, hf_config: PretrainedConfig
) -> Callable[[ItemBackend], EmbedsBackend]:
    """Return a function that wraps a backend, to take embeddings if options and model allow it."""
    embeds = next((f.embeds for f in FAMILIES if f.model_type == hf_config.model_type), ())
    return partial(
        EmbedsBackend,
        processor=processor,
        is_enabled=options.enable_mm_embeds,
        modalities=embeds,
        width=hf_config.get_text_config(decoder=True).hidden_size if embeds else 0,
    )


def _build_hasher(
    options: MediaOptions, processor: MultiModalProcessor, model_revision: str
) -> MediaHasher:
    algorithm = options.mm_hasher_algorithm
    return MediaHasher(
        choose_algorithm(platform.machine()) if algorithm == "auto" else algorithm,
        model_revision=model_revision,
        processor_fingerprint=processor.fingerprint,
    )


def _get_own_options(options: MediaOptions) -> OwnOptions:
    return OwnOptions(
        processor_kwargs=dict(options.mm_processor_kwargs),
        media_io_kwargs={name: dict(given) for name, given in options.media_io_kwargs.items()},
    )


def _build_pool(
    processor: MultiModalProcessor,
    loading: LoadingOptions,
    checkpoint: Checkpoint,
    options: MediaOptions,
    store: ShmStore | None,
    own: OwnOptions,
    warm_modalities: Collection[str],
) -> ProcessPool | None:
    if not options.mm_processor_pool_size or not processor.modalities:  # text needs no pool
        return None
    shm_fd = None if store is None else store.fd
    settings = PoolSettings(
        directory=str(checkpoint.directory),
        trust_remote_code=loading.trust_remote_code,
        # These processes fetch nothing, so they need no allowed hosts and no directory.
        limits=replace(options.get_limits(), allowed_domains=frozenset(), allowed_local_path=None),
        shm_fd=shm_fd,
        warm_modalities=tuple(warm_modalities),
        own_options=own,
        allow_larger_media=options.allow_larger_media,
    )
    return ProcessPool(
        options.mm_processor_pool_size,
        handler=_HANDLER,
        settings=encode_plain(settings),
        inherited_fds=() if shm_fd is None else (shm_fd,),
        num_threads=options.mm_processor_threads,
    )
