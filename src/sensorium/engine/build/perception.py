"""Builds the parts that process media: sources, hashes, backends and caches."""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import dataclass, replace

from sensorium.engine.build.options import MediaOptions
from sensorium.multimodal.cache.interface import ProcessorCache, ReceiverCache, SenderCache
from sensorium.multimodal.cache.item_table import ItemTable
from sensorium.multimodal.cache.mirror import UNKNOWN_EPOCH, MirrorReceiver, MirrorSender
from sensorium.multimodal.cache.shm import SharedReadonlyCache, ShmReceiver, ShmSender
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.fetching.loader import MediaLoader
from sensorium.multimodal.hasher import MediaHasher, choose_algorithm
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
from sensorium.multimodal.processing.item_worker import ItemWorker
from sensorium.multimodal.processing.layouts import SizeLayouts, has_sized_images
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.multimodal.uuids import SharedUuidBindings, UuidBindings

_HANDLER = "sensorium.multimodal.processing.item_backend:make_handler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """The caches of a frontend."""

    sender: SenderCache
    readonly: ProcessorCache  # for requests that this engine does not run
    receiver: ReceiverCache | None = None  # the core's side, if the core is in the same process
    store: ShmStore | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Perception:
    """The parts of a frontend that process media."""

    caches: Caches
    pipeline: MediaPipeline
    readonly: MediaPipeline
    loader: MediaLoader
    pool: ProcessPool | None

    def close(self) -> None:
        """End the processes and threads."""
        self.loader.close()
        if self.pool is not None:
            self.pool.close()
        if self.caches.store is not None:
            self.caches.store.close()


def build_store(options: MediaOptions) -> ShmStore | None:
    """Return the memory that frontends, their pools and the core share, if they share any."""
    if not options.has_shared_memory:
        return None
    return ShmStore.create(
        capacity_bytes=options.capacity_bytes, max_object_bytes=options.max_object_bytes
    )


def build_receiver(store: ShmStore | None) -> ReceiverCache:
    """Return the core's side of the cache."""
    return MirrorReceiver() if store is None else ShmReceiver(store)


def build_caches(
    options: MediaOptions, store: ShmStore | None, receiver: ReceiverCache | None = None
) -> Caches:
    """Return a frontend's caches. `receiver` is the core's side, if the core is in this process."""
    capacity = options.capacity_bytes
    if store is None:
        epoch = receiver.epoch if isinstance(receiver, MirrorReceiver) else UNKNOWN_EPOCH
        return Caches(
            sender=MirrorSender(capacity, epoch=epoch),
            receiver=receiver,
            readonly=ItemTable(capacity),
        )
    return Caches(
        sender=ShmSender(store),
        receiver=receiver,
        readonly=SharedReadonlyCache(store, capacity),
        store=store,
    )


def build_readonly_caches(options: MediaOptions) -> Caches:
    """Return the caches of a frontend without an engine. They send nothing to a core."""
    return Caches(sender=MirrorSender(0), readonly=ItemTable(options.capacity_bytes))


def build_perception(
    options: MediaOptions,
    caches: Caches,
    processor: MultiModalProcessor,
    *,
    directory: str,
    model_revision: str,
    trust_remote_code: bool,
    embeds_modalities: Collection[str] = (),  # that may be sent as precomputed embeddings
    embeds_width: int = 0,  # the width of these embeddings
    starts_early: bool = False,  # while the pool starts, cheap items are processed here
    warm_modalities: Collection[str] = (),  # that the pool's processes warm up for
) -> Perception:
    """Build the parts that process media."""
    limits, store = options.get_limits(), caches.store
    hasher = _build_hasher(options, processor, model_revision)
    loader = MediaLoader(limits)
    uuids = UuidBindings() if store is None else SharedUuidBindings(store, hasher)
    pool = _build_pool(options, store, directory, trust_remote_code, warm_modalities)
    own = None if options.allow_larger_media else _get_own_options(options)
    worker = ItemWorker(processor, limits, own)

    def make_backend(*, keep: bool) -> ItemBackend:
        if pool is None:
            return InProcessBackend(worker)
        late = PoolBackend(pool, processor, limits, keep=keep)
        early = InProcessBackend(worker, max_cost_s=EARLY_COST_S)
        return EarlyBackend(pool, early, late) if starts_early else late

    layouts = SizeLayouts(hasher=hasher, backend=make_backend(keep=False), limits=limits)
    readonly_layouts = layouts if has_sized_images(processor) else None

    def make_pipeline(cache: ProcessorCache, *, keep: bool, is_readonly: bool) -> MediaPipeline:
        return MediaPipeline(
            cache=cache,
            shared=caches.sender if keep and isinstance(caches.sender, ShmSender) else None,
            hasher=hasher,
            loader=loader,
            backend=EmbedsBackend(
                make_backend(keep=keep),
                processor,
                is_enabled=options.enable_mm_embeds,
                modalities=embeds_modalities,
                width=embeds_width,
            ),
            uuids=uuids,
            limits=limits,
            layouts=readonly_layouts if is_readonly else None,
        )

    return Perception(
        caches=caches,
        pipeline=make_pipeline(caches.sender, keep=store is not None, is_readonly=False),
        readonly=make_pipeline(caches.readonly, keep=False, is_readonly=True),
        loader=loader,
        pool=pool,
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
    options: MediaOptions,
    store: ShmStore | None,
    directory: str,
    trust_remote_code: bool,
    warm_modalities: Collection[str],
) -> ProcessPool | None:
    if not options.mm_processor_pool_size:
        return None
    shm_fd = None if store is None else store.fd
    settings = PoolSettings(
        directory=directory,
        trust_remote_code=trust_remote_code,
        # These processes fetch nothing, so that they need no places to fetch from.
        limits=replace(options.get_limits(), allowed_domains=frozenset(), allowed_local_path=None),
        shm_fd=shm_fd,
        warm_modalities=tuple(warm_modalities),
        own_options=_get_own_options(options),
        allow_larger_media=options.allow_larger_media,
    )
    return ProcessPool(
        options.mm_processor_pool_size,
        handler=_HANDLER,
        settings=encode_plain(settings),
        inherited_fds=() if shm_fd is None else (shm_fd,),
    )
