"""What a process of the pool runs: the model's processor, and the shared store if there is one."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import msgspec

from sensorium.models.loading import load_config
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.decoding.guards import CostlyItemError, limit_memory_growth
from sensorium.multimodal.limits import MediaLimits
from sensorium.multimodal.pool.messages import CostlyJobError
from sensorium.multimodal.processing.cost_guard import OwnOptions
from sensorium.multimodal.processing.dummy_files import make_dummy_file
from sensorium.multimodal.processing.item_messages import (
    ItemReply,
    decode_job,
    encode_plain,
    encode_reply,
)
from sensorium.multimodal.processing.item_worker import ItemJob, ItemWorker
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import MultiModalKwargsItem

_logger = logging.getLogger(__name__)
_PLACES = ("allowed_domains", "allowed_local_path")  # what a process that fetches nothing ignores


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    directory: str
    trust_remote_code: bool
    limits: dict[str, Any]
    shm_fd: int | None
    warm_modalities: tuple[str, ...]
    own_options: OwnOptions
    allow_larger_media: bool


def make_settings(
    directory: str,
    *,
    trust_remote_code: bool,
    limits: MediaLimits,
    shm_fd: int | None,
    warm_modalities: Collection[str] = (),
    own_options: OwnOptions | None = None,
    allow_larger_media: bool = False,
) -> bytes:
    """`warm_modalities`: of which it processes an item before the first that anybody sends.
    `own_options`: what the server gives to processor and decoders; with `allow_larger_media` a
    request may ask for more than these can make of an item.
    """
    sizes = {name: value for name, value in asdict(limits).items() if name not in _PLACES}
    return encode_plain(
        _Settings(
            directory=directory,
            trust_remote_code=trust_remote_code,
            limits=sizes,
            shm_fd=shm_fd,
            warm_modalities=tuple(warm_modalities),
            own_options=own_options or OwnOptions(),
            allow_larger_media=allow_larger_media,
        )
    )


def make_handler(settings: bytes) -> ItemHandler:
    given = msgspec.msgpack.decode(settings, type=_Settings)
    config = load_config(given.directory, trust_remote_code=given.trust_remote_code)
    limits = MediaLimits(**given.limits)
    processor = MultiModalProcessor(
        given.directory, config, limits=limits, trust_remote_code=given.trust_remote_code
    )
    own = given.own_options
    worker = ItemWorker(processor, limits, None if given.allow_larger_media else own)
    _warm_up(worker, own, [m for m in processor.modalities if m in given.warm_modalities])
    store = None if given.shm_fd is None else ShmStore.attach(given.shm_fd)
    limit_memory_growth(limits.max_process_bytes)
    return ItemHandler(worker, store)


def _warm_up(worker: ItemWorker, own: OwnOptions, modalities: Collection[str]) -> None:
    for modality in modalities:
        processor_kwargs, decode_options = own.resolve(modality, is_encoded=True)
        job = ItemJob(
            mm_hash="",
            modality=modality,
            decode_options=decode_options,
            processor_kwargs=processor_kwargs,
        )
        try:
            worker.process(job, make_dummy_file(modality))
        except Exception:  # the contract of a warm-up: a cold worker works all the same
            _logger.warning("a worker's warm-up failed for %s", modality, exc_info=True)


class ItemHandler:
    def __init__(self, worker: ItemWorker, store: ShmStore | None) -> None:
        self._worker = worker
        self._store = store

    def __call__(
        self, job: bytes, block: memoryview, *, max_cost_s: float
    ) -> tuple[bytes, MultiModalKwargsItem]:
        item_job, media, keep = decode_job(job, block)
        try:
            item, times = self._worker.process(item_job, media, max_cost_s=max_cost_s)
        except CostlyItemError as error:
            raise CostlyJobError(error.cost_s) from error
        if item.layout is None:
            raise InvariantError("an item was processed and has no layout")
        reference = None
        if self._store is not None and keep:
            reference = self._store.put(item)
        reply = encode_reply(ItemReply(layout=item.layout, reference=reference, times=dict(times)))
        if self._store is None or reference is None:
            return reply, item.kwargs
        # Not leased on its way: should it be evicted before it is used, it is processed again.
        self._store.release(reference)
        return reply, {}

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
