"""Where items are processed: in the thread that asks, or in a pool of processes.

Before an item goes to the pool, its work is estimated from a few bytes at most, because that runs
in the process that serves requests. What only FFmpeg can see (how many frames a video has, how long
a sound is) is found by the process that decodes it.

Embeddings are taken only if the operator allows it, because the sender decides what the decoder
sees. They need a family in which the number of an item's embeddings fixes its place in a prompt.
Where positions follow from a grid, or text stands among the placeholders, they are refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from PIL import Image

from sensorium.multimodal.decoding.guards import (
    CostlyItemError,
    estimate_frames_s,
    estimate_sound_s,
)
from sensorium.multimodal.decoding.images import check_num_pixels, read_header_size
from sensorium.multimodal.item_codec import PrecomputedEmbeds
from sensorium.multimodal.media import MediaBytes, MediaLimits
from sensorium.multimodal.pool.jobs import SHORT_S, PoolReply
from sensorium.multimodal.pool.pool import ProcessPool
from sensorium.multimodal.processing.item_handler import decode_reply, encode_job
from sensorium.multimodal.processing.item_worker import ItemJob, ItemWorker
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.multimodal.single_flight import FinishedFlight, Flight
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import PRECOMPUTED, ItemTimes, ProcessedItem, ShmReference

_UNKNOWN_RATE = 16_000  # samples a second; the rate does not matter for an estimate


def estimate_cost_s(modality: str, media: object, limits: MediaLimits) -> float | None:
    """Return the seconds of work that an item will be; `None` if only a decoder can see it.

    Raise `RequestError` for a picture that is larger than the limits allow, by its header.
    """
    if isinstance(media, MediaBytes):
        size = read_header_size(media.data) if modality == "image" else None
        if size is None:
            return None
        check_num_pixels(*size, limits)
        return estimate_frames_s(1, *size)
    if isinstance(media, tuple) and len(media) == 2:
        media = media[0]  # beside it: a rate, or the metadata of frames
    num_values = _count_values(media)
    if modality == "audio":
        return estimate_sound_s(num_values / _UNKNOWN_RATE)
    return estimate_frames_s(1, num_values // 3, 1)


def _count_values(media: Any) -> int:
    """Count the numbers that media in process consists of; 0 for what is no such media."""
    if isinstance(media, list | tuple):
        return sum(map(_count_values, media))
    if isinstance(media, Image.Image):
        return 3 * media.width * media.height
    shape = getattr(media, "shape", None)
    return math.prod(shape) if isinstance(shape, tuple) else 0


EARLY_COST_S = SHORT_S  # of items that a frontend processes itself before its pool is there
_KILL_DELAY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedItem:
    """An item that was processed."""

    result: ProcessedItem | ShmReference
    times: ItemTimes  # how long its stages took, wherever they ran


class ItemBackend(Protocol):
    def start(self, job: ItemJob, media: object) -> Flight:
        """Begin with an item, which will be a `FinishedItem`.

        The media is `MediaBytes`, or what a caller in process may give.
        """
        ...


class InProcessBackend:
    """A backend that processes items in the caller's thread.

    `start` returns when the item is done.
    """

    def __init__(self, worker: ItemWorker, *, max_cost_s: float = math.inf) -> None:
        self._worker = worker
        self._max_cost_s = max_cost_s

    def start(self, job: ItemJob, media: object) -> Flight:
        """Raise `CostlyItemError` for an item that is more work than `max_cost_s`."""
        cost_s = estimate_cost_s(job.modality, media, self._worker.limits)
        if cost_s is not None and cost_s > self._max_cost_s:
            raise CostlyItemError(cost_s)
        plain = media.data if isinstance(media, MediaBytes) else media
        item, times = self._worker.process(job, plain, max_cost_s=self._max_cost_s)
        return FinishedFlight(FinishedItem(result=item, times=times))


class PoolBackend:
    """A backend that processes items in the pool.

    With `keep` results are put into the store that is shared with the pool's processes.
    """

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
            decoded = decode_reply(reply.reply)
            if decoded.reference is not None:
                return FinishedItem(result=decoded.reference, times=decoded.times)
            item = ProcessedItem(
                modality=job.modality,
                mm_hash=job.mm_hash,
                kwargs=reply.kwargs,
                layout=decoded.layout,
            )
            return FinishedItem(result=item, times=decoded.times)

        return self._pool.submit(
            message,
            blocks,
            wait_s=self._limits.process_wait_s,
            # A decoder ends by itself at its deadline; it is killed only if it does not.
            deadline_s=self._limits.process_deadline_s + _KILL_DELAY_S,
            cost_s=cost_s,
            on_reply=as_result,
        )


class EarlyBackend:
    """A backend in the caller's thread until the pool is ready, and in the pool then.

    It is for frontends that serve before their pool has a worker, so that no request waits for its
    imports. Long work waits for the pool all the same. In the caller's thread limits on size hold,
    but a processor's work that has begun can't be cut off by a deadline, and a crash of a decoder
    is not the worker's alone.
    """

    def __init__(self, pool: ProcessPool, early: ItemBackend, late: ItemBackend) -> None:
        self._pool = pool
        self._early = early
        self._late = late

    def start(self, job: ItemJob, media: object) -> Flight:
        if self._pool.is_starting:
            try:
                return self._early.start(job, media)
            except CostlyItemError:  # the pool starts with this job, if it has not yet
                pass
        return self._late.start(job, media)


class EmbedsBackend:
    """A backend that takes embeddings itself and leaves other items to another backend.

    Embeddings are taken of `modalities`, and have the `width` of the model's decoder.
    """

    def __init__(
        self,
        backend: ItemBackend,
        processor: MultiModalProcessor,
        *,
        is_enabled: bool,
        modalities: Collection[str],
        width: int,
    ) -> None:
        self._backend = backend
        self._processor = processor
        self._is_enabled = is_enabled
        self._modalities = frozenset(modalities)
        self._width = width

    def start(self, job: ItemJob, media: object) -> Flight:
        if not isinstance(media, PrecomputedEmbeds):
            return self._backend.start(job, media)
        self._check(job.modality, media.tensor)
        # A copy: the caller may go on with its own.
        embeds = media.tensor.detach().to("cpu", copy=True).contiguous()
        item = ProcessedItem(
            modality=job.modality,
            mm_hash=job.mm_hash,
            kwargs={PRECOMPUTED: embeds},
            layout=self._processor.make_plain_layout(job.modality, len(embeds)),
        )
        return FinishedFlight(FinishedItem(result=item, times={}))

    def _check(self, modality: str, tensor: torch.Tensor) -> None:
        if not self._is_enabled:
            raise RequestError("embeddings are not taken here: start with enable_mm_embeds")
        if modality not in self._modalities:
            raise RequestError(
                f"this model takes no embeddings of {modality}: it needs more than their number"
            )
        if tensor.shape[1] != self._width:
            raise RequestError(f"embeddings have the width {self._width}, not {tensor.shape[1]}")
        if not bool(torch.isfinite(tensor).all()):
            raise RequestError("some of the embeddings are not finite numbers")
