"""Where items are processed: in the thread that asks, in a pool of processes, or in one until the
other is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from sensorium.multimodal.decoding.guards import CostlyItemError
from sensorium.multimodal.limits import MediaLimits
from sensorium.multimodal.media_bytes import MediaBytes
from sensorium.multimodal.pool.jobs import SHORT_S, PoolReply
from sensorium.multimodal.pool.pool import ProcessPool
from sensorium.multimodal.processing.item_messages import decode_reply, encode_job
from sensorium.multimodal.processing.item_worker import ItemJob, ItemWorker
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.multimodal.processing.work_estimate import estimate_cost_s
from sensorium.multimodal.single_flight import FinishedFlight, Flight
from sensorium.types.multimodal import ProcessedItem
from sensorium.types.times import ItemTimes
from sensorium.types.transfer import ShmReference

EARLY_COST_S = SHORT_S  # of items that a frontend processes itself before its pool is there
_KILL_DELAY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedItem:
    """`times`: how long its stages took, wherever they ran."""

    result: ProcessedItem | ShmReference
    times: ItemTimes


class ItemBackend(Protocol):
    def start(self, job: ItemJob, media: object) -> Flight:
        """Begin with an item, which will be a `FinishedItem`; media is `MediaBytes`, or what a
        caller in process may give.
        """
        ...


class InProcessBackend:
    """`start` returns when the item is done."""

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
    """`keep`: results are put into the shared store that the pool's processes know."""

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
    """In the caller's thread until the pool has a worker that is ready, and in the pool from then
    on. For frontends that serve before their pool is there: nobody waits for its imports.

    What is long work waits for the pool all the same. What holds in process holds here: limits on
    size are kept, but a processor's work that has begun can't be cut off by a deadline, nor is a
    crash of a decoder the worker's alone.
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
