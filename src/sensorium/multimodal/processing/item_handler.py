"""What a process of the pool runs: the model's processor, and the shared store if there is one.

A job and its result are msgpack beside blocks of raw memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from sensorium.models.loading import load_config
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.decoding.guards import CostlyItemError, limit_memory_growth
from sensorium.multimodal.item_codec import as_bytes, decode_block, encode_header
from sensorium.multimodal.media import MediaBytes, MediaLimits
from sensorium.multimodal.pool.channel import CostlyJobError
from sensorium.multimodal.processing.cost_guard import OwnOptions
from sensorium.multimodal.processing.dummy_media import make_dummy_file
from sensorium.multimodal.processing.item_worker import ItemJob, ItemWorker
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import InvariantError, RequestError
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem, ShmReference


class _ItemMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A job for a process of the pool. Its block has the media."""

    job: ItemJob
    keep: bool  # put the result into shared memory
    # What the block is: the "bytes" of a file, or the pixels or samples of a "pil" image, a "numpy"
    # array or a "torch" tensor.
    form: str
    header: bytes = b""
    metadata: dict[str, Any] | None = None


class ItemReply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job. Its tensors may be sent beside it."""

    layout: ItemLayout
    reference: ShmReference | None = None  # where the tensors are, if they are not beside it
    times: dict[str, float] = {}  # stage -> seconds


def _as_plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no plain value")


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_plain)
_message_decoder = msgspec.msgpack.Decoder(_ItemMessage)
_reply_decoder = msgspec.msgpack.Decoder(ItemReply)


def encode_job(
    job: ItemJob, media: object, *, processor: MultiModalProcessor, keep: bool
) -> tuple[bytes, list[Any]]:
    """Return the message, and the blocks that go with it.

    Raise `RequestError` for media in process that no processor understands.
    """
    if isinstance(media, MediaBytes):
        return encode_plain(_ItemMessage(job=job, keep=keep, form="bytes")), [media.data]
    checked, metadata = processor.check_media(job.modality, media, job.processor_kwargs)
    form, tensor = _as_tensor(checked)
    message = _ItemMessage(
        job=job,
        keep=keep,
        form=form,
        header=encode_header({"media": tensor}),
        metadata=metadata,
    )
    return encode_plain(message), [as_bytes(tensor).numpy().data]


def encode_plain(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message, or raise a `RequestError` if an option in it is an object."""
    try:
        return _encoder.encode(message)
    except (TypeError, UnicodeEncodeError, OverflowError) as error:
        raise RequestError("options of media are plain numbers, texts, lists and maps") from error


def _as_tensor(media: object) -> tuple[str, torch.Tensor]:
    if isinstance(media, torch.Tensor):
        return "torch", media
    if isinstance(media, np.ndarray):
        return "numpy", torch.from_numpy(media)
    if isinstance(media, Image.Image):
        return "pil", torch.from_numpy(np.array(media))
    raise InvariantError(f"checked media can't be a {type(media).__name__}")


def decode_job(message: bytes, block: memoryview) -> tuple[ItemJob, object, bool]:
    """Return the job, its media, and whether to keep the result."""
    decoded = _message_decoder.decode(message)
    if decoded.form == "bytes":
        return decoded.job, bytes(block), decoded.keep
    tensor = decode_block(decoded.header, block)["media"]
    media: object = tensor
    if decoded.form == "numpy":
        media = tensor.numpy()
    elif decoded.form == "pil":
        media = Image.fromarray(tensor.numpy())
    if decoded.metadata is not None:
        media = media, decoded.metadata
    return decoded.job, media, decoded.keep


def encode_reply(reply: ItemReply) -> bytes:
    return _encoder.encode(reply)


def decode_reply(reply: bytes) -> ItemReply:
    return _reply_decoder.decode(reply)


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
    """Return the settings of a handler.

    It processes an item of each of `warm_modalities` before the first job. `own_options` are those
    that the server gives to processor and decoders. With `allow_larger_media` a request may ask for
    more than these can make of an item.
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
