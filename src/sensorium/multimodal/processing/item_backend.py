"""Processes items in the caller's thread, or in a pool of processes.

Before an item goes to the pool, its work is estimated from a few bytes of the file at most, because
the estimate runs in the process that serves requests. What only FFmpeg can find out (how many
frames a video has, how long audio is) is found by the process that decodes the item. A job and its
result are msgpack with separate blocks of raw memory. A process of the pool runs `make_handler`.

Precomputed embeddings are accepted only if the operator allows it, because their sender decides
what the decoder of the model reads. They are refused where their number alone does not fix an
item's place in a prompt: where positions depend on a grid, or text comes between the placeholders.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from PIL import Image

from sensorium.models.loading import load_config
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.decoding.guards import (
    CostlyItemError,
    estimate_audio_s,
    estimate_frames_s,
    limit_memory_growth,
)
from sensorium.multimodal.decoding.images import check_num_pixels, read_header_size
from sensorium.multimodal.item_codec import PrecomputedEmbeds, as_bytes, decode_block, encode_header
from sensorium.multimodal.media import MediaBytes, MediaLimits
from sensorium.multimodal.pool.channel import CostlyJobError
from sensorium.multimodal.pool.jobs import SHORT_S, PoolReply
from sensorium.multimodal.pool.pool import ProcessPool
from sensorium.multimodal.processing.cost_guard import OwnOptions
from sensorium.multimodal.processing.dummy_media import make_dummy_file
from sensorium.multimodal.processing.item_worker import ItemJob, ItemWorker
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.multimodal.single_flight import FinishedFlight, Flight
from sensorium.types.errors import InvariantError, RequestError
from sensorium.types.multimodal import (
    PRECOMPUTED,
    ItemLayout,
    ItemTimes,
    MultiModalKwargsItem,
    ProcessedItem,
    ShmReference,
)

_logger = logging.getLogger(__name__)
EARLY_COST_S = SHORT_S  # a frontend itself processes shorter items until its pool is ready
_KILL_DELAY_S = 5.0
_UNKNOWN_RATE = 16_000  # samples a second; the exact rate does not matter for an estimate


class _ItemMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A job for a process of the media pool; its media follows as a block of raw memory."""

    job: ItemJob
    keep: bool  # put the result into shared memory
    # What the block is: the "bytes" of a file, or the pixels or samples of a "pil" image, a "numpy"
    # array or a "torch" tensor.
    form: str
    header: bytes = b""
    metadata: dict[str, Any] | None = None


class _ItemReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a process of the media pool, without the tensors of the item."""

    layout: ItemLayout
    reference: ShmReference | None  # where the tensors are; None: they follow the reply
    times: ItemTimes  # stage -> seconds


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a process of the media pool gets when it starts."""

    directory: str  # of the model
    trust_remote_code: bool
    limits: MediaLimits
    shm_fd: int | None  # of the shared memory for results, to which it attaches
    warm_modalities: tuple[str, ...]  # an item of each is processed before the first job
    own_options: OwnOptions  # the operator's options for the processor and the decoders
    allow_larger_media: bool  # a request's options may make items larger than `own_options` can


def _as_plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} can't be encoded as msgpack")


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_plain)
_message_decoder = msgspec.msgpack.Decoder(_ItemMessage)
_reply_decoder = msgspec.msgpack.Decoder(_ItemReply)


def encode_job(
    job: ItemJob, media: object, *, processor: MultiModalProcessor, keep: bool
) -> tuple[bytes, list[Any]]:
    """Return the message and the memory blocks of a job for a process of the media pool.

    `keep` asks for the result to be put into shared memory. Raise `RequestError` for decoded media
    that no processor would understand.
    """
    if isinstance(media, MediaBytes):
        return encode_plain(_ItemMessage(job=job, keep=keep, form="bytes")), [media.data]
    checked, metadata = processor.check_media(job.modality, media, job.processor_kwargs)
    form, tensor = _as_tensor(checked)
    header = encode_header({"media": tensor})
    message = _ItemMessage(job=job, keep=keep, form=form, header=header, metadata=metadata)
    return encode_plain(message), [as_bytes(tensor).numpy().data]


def encode_plain(message: msgspec.Struct) -> bytes:
    """Return a message as msgpack; raise `RequestError` if an option in it is no plain value."""
    try:
        return _encoder.encode(message)
    except (TypeError, UnicodeEncodeError, OverflowError) as error:
        raise RequestError(
            "options of media must be plain values: numbers, strings, lists and maps"
        ) from error


def _as_tensor(media: object) -> tuple[str, torch.Tensor]:
    if isinstance(media, torch.Tensor):
        return "torch", media
    if isinstance(media, np.ndarray):
        return "numpy", torch.from_numpy(media)
    if isinstance(media, Image.Image):
        return "pil", torch.from_numpy(np.array(media))
    raise InvariantError(f"media of the type {type(media).__name__} can't be sent to a worker")


def decode_job(message: bytes, block: memoryview) -> tuple[ItemJob, object, bool]:
    """Return the job, its media, and whether to put the result into shared memory."""
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


def make_handler(settings: bytes) -> ItemHandler:
    """Return the function with which a process of the media pool handles its jobs.

    `settings` are msgpack bytes of `PoolSettings`. This loads the model's processor, warms it up
    with a small item of each modality in the settings, and then limits the memory of the process.
    """
    given = msgspec.msgpack.decode(settings, type=PoolSettings)
    config = load_config(given.directory, trust_remote_code=given.trust_remote_code)
    processor = MultiModalProcessor(
        given.directory, config, limits=given.limits, trust_remote_code=given.trust_remote_code
    )
    own = given.own_options
    worker = ItemWorker(processor, given.limits, None if given.allow_larger_media else own)
    _warm_up(worker, own, [m for m in processor.modalities if m in given.warm_modalities])
    store = None if given.shm_fd is None else ShmStore.attach(given.shm_fd)
    limit_memory_growth(given.limits.max_process_bytes)
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
        except Exception:  # a process of the pool can work without its warm-up
            _logger.warning(
                "the warm-up of a process of the media pool failed for %s; the process continues",
                modality,
                exc_info=True,
            )


class ItemHandler:
    """A callable with which a process of the media pool handles jobs: decode, process, reply."""

    def __init__(self, worker: ItemWorker, store: ShmStore | None) -> None:
        self._worker = worker
        self._store = store  # for results; None: all are sent with the reply

    def __call__(
        self, job: bytes, block: memoryview, *, max_cost_s: float
    ) -> tuple[bytes, MultiModalKwargsItem]:
        """Return the encoded reply, and the tensors to send with it.

        No tensors are sent if shared memory has them. Raise `CostlyJobError` if decoding is more
        work than `max_cost_s` seconds.
        """
        item_job, media, keep = decode_job(job, block)
        try:
            item, times = self._worker.process(item_job, media, max_cost_s=max_cost_s)
        except CostlyItemError as error:
            raise CostlyJobError(error.cost_s) from error
        if item.layout is None:
            raise InvariantError("a processed media item has no layout (its text in the prompt)")
        reference = None if self._store is None or not keep else self._store.put(item)
        reply = _encoder.encode(_ItemReply(layout=item.layout, reference=reference, times=times))
        if self._store is None or reference is None:
            return reply, item.kwargs
        # Until a request uses the item, no lease keeps it in shared memory. If it is evicted before
        # that, it is processed again.
        self._store.release(reference)
        return reply, {}

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def estimate_cost_s(modality: str, media: object, limits: MediaLimits) -> float | None:
    """Return the estimated seconds for decoding and processing an item, from its header or shape.

    Return `None` if the estimate needs a decoder, as for the file of a video or audio. Raise
    `RequestError` if an image is larger than `limits` allow, by its header.
    """
    if isinstance(media, MediaBytes):
        size = read_header_size(media.data) if modality == "image" else None
        if size is None:
            return None
        check_num_pixels(*size, limits)
        return estimate_frames_s(1, *size)
    if isinstance(media, tuple) and len(media) == 2:
        media = media[0]  # the second entry is a rate, or the metadata of frames
    num_values = _count_values(media)
    if modality == "audio":
        return estimate_audio_s(num_values / _UNKNOWN_RATE)
    return estimate_frames_s(1, num_values // 3, 1)


def _count_values(media: Any) -> int:
    """Return how many pixel values or samples decoded media has, or 0 if its form is unknown."""
    if isinstance(media, list | tuple):
        return sum(map(_count_values, media))
    if isinstance(media, Image.Image):
        return 3 * media.width * media.height
    shape = getattr(media, "shape", None)
    return math.prod(shape) if isinstance(shape, tuple) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedItem:
    """A processed media item, or its place in shared memory, and how long its stages took."""

    result: ProcessedItem | ShmReference
    times: ItemTimes  # stage -> seconds, in any process
    is_stored: bool = False  # not to be written to a tier: it came from there, or is encoded


class ItemBackend(Protocol):
    """An interface for processing media items, in the caller's thread or in the media pool."""

    def start(self, job: ItemJob, media: object) -> Flight:
        """Begin to process encoded or decoded media, and return a future of a `FinishedItem`."""
        ...


class InProcessBackend:
    """A backend that processes media items in the caller's thread, before `start` returns.

    `start` raises `CostlyItemError` for an item that takes more than `max_cost_s` seconds of work.
    """

    def __init__(self, worker: ItemWorker, *, max_cost_s: float = math.inf) -> None:
        self._worker = worker
        self._max_cost_s = max_cost_s

    def start(self, job: ItemJob, media: object) -> Flight:
        cost_s = estimate_cost_s(job.modality, media, self._worker.limits)
        if cost_s is not None and cost_s > self._max_cost_s:
            raise CostlyItemError(cost_s)
        plain = media.data if isinstance(media, MediaBytes) else media
        item, times = self._worker.process(job, plain, max_cost_s=self._max_cost_s)
        return FinishedFlight(FinishedItem(result=item, times=times))


class PoolBackend:
    """A backend that processes items in the media pool; `keep` puts them into shared memory."""

    def __init__(
        self, pool: ProcessPool, processor: MultiModalProcessor, limits: MediaLimits, *, keep: bool
    ) -> None:
        self._pool = pool
        self._processor = processor
        self._limits = limits
        self._keep = keep

    def start(self, job: ItemJob, media: object) -> Flight:
        cost_s = estimate_cost_s(job.modality, media, self._limits)
        message, blocks = encode_job(job, media, processor=self._processor, keep=self._keep)

        def as_result(reply: PoolReply) -> FinishedItem:
            decoded = _reply_decoder.decode(reply.reply)
            result = decoded.reference or ProcessedItem(
                modality=job.modality,
                mm_hash=job.mm_hash,
                kwargs=reply.kwargs,
                layout=decoded.layout,
            )
            return FinishedItem(result=result, times=decoded.times)

        return self._pool.submit(
            message,
            blocks,
            wait_s=self._limits.process_wait_s,
            # A decoder ends by itself at its deadline. It is killed only if it does not.
            deadline_s=self._limits.process_deadline_s + _KILL_DELAY_S,
            cost_s=cost_s,
            on_reply=as_result,
        )


class EarlyBackend:
    """A backend that works in the caller's thread until the media pool is ready, then in the pool.

    So a request does not wait for the imports of the pool's first process. Only an item with long
    work waits for the pool. In the caller's thread the limits on size hold, but a deadline can't
    stop a processor that has begun, and a crash of a decoder ends the whole frontend.
    """

    def __init__(self, pool: ProcessPool, early: ItemBackend, late: ItemBackend) -> None:
        self._pool = pool
        self._early = early
        self._late = late

    def start(self, job: ItemJob, media: object) -> Flight:
        if self._pool.is_starting:
            try:
                return self._early.start(job, media)
            except CostlyItemError:  # submitting the job starts the pool, if needed
                pass
        return self._late.start(job, media)


@dataclass(frozen=True, slots=True)
class EmbedsBackend:
    """A backend that checks precomputed embeddings, and passes other media to another backend."""

    backend: ItemBackend
    processor: MultiModalProcessor
    is_enabled: bool
    modalities: Collection[str]  # embeddings of these are taken
    width: int  # of an embedding in the model's decoder

    def start(self, job: ItemJob, media: object) -> Flight:
        if not isinstance(media, PrecomputedEmbeds):
            return self.backend.start(job, media)
        self._check(job.modality, media.tensor)
        # A copy, because the caller may change its own tensor later.
        embeds = media.tensor.detach().to("cpu", copy=True).contiguous()
        item = ProcessedItem(
            modality=job.modality,
            mm_hash=job.mm_hash,
            kwargs={PRECOMPUTED: embeds},
            layout=self.processor.make_plain_layout(job.modality, len(embeds)),
        )
        return FinishedFlight(FinishedItem(result=item, times={}))

    def _check(self, modality: str, tensor: torch.Tensor) -> None:
        if not self.is_enabled:
            raise RequestError(
                "this server takes no precomputed embeddings: start it with enable_mm_embeds"
            )
        if modality not in self.modalities:
            raise RequestError(
                f"this model takes no embeddings of {modality}: their number alone does not fix "
                "their place in a prompt"
            )
        if tensor.shape[1] != self.width:
            raise RequestError(
                f"embeddings for this model must have the width {self.width}, not {tensor.shape[1]}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise RequestError(
                "some of the embeddings are not finite numbers: they are NaN or infinite"
            )
