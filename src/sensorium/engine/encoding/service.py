"""Turns media into encoder outputs, each item once, whatever the transport is.

An item is decoded and processed by the same backend as in an engine, and then encoded. Equal items
that come together share one computation (a `Flight`), whichever engines send them. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import msgspec
import torch

from sensorium.engine.encoding.towers import TowerThread
from sensorium.multimodal.cache.interface import ItemHandle
from sensorium.multimodal.item_codec import get_num_bytes
from sensorium.multimodal.media import MediaLimits
from sensorium.multimodal.processing.item_backend import FinishedItem, ItemBackend
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.single_flight import FinishedFlight, Flight, SingleFlight
from sensorium.multimodal.tiers.tiers import MediaTiers, is_small
from sensorium.types.errors import CapacityError, InvariantError
from sensorium.types.multimodal import ENCODED, ItemTimes, ProcessedItem
from sensorium.utils.lru import LruCache


class EncoderCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of media items that an encoder has worked on since its start."""

    num_asked: int  # asked for by engines
    num_kept: int  # answered with what was kept
    num_processed: int  # decoded and processed
    num_encoded: int  # an encoder was run for them


class EncodingService:
    """A service that decodes, processes and encodes media items, equal ones once.

    At most `max_items` are worked on at once, and more are refused with a `CapacityError`. The
    results take at most `capacity_bytes` of memory. With `tiers` they are also kept there, and
    `check_stored` raises a `RequestError` for an invalid item from a tier.
    """

    def __init__(
        self,
        backend: ItemBackend,
        towers: TowerThread,
        *,
        limits: MediaLimits,
        capacity_bytes: int,
        max_items: int,
        tiers: MediaTiers | None = None,
        check_stored: Callable[[ItemJob, ProcessedItem], None] = lambda _job, _item: None,
    ) -> None:
        self._check_stored = check_stored
        self._backend = backend
        self._towers = towers
        self._limits = limits
        self._max_items = max_items
        self._tiers = tiers
        self._kept: LruCache[str, ProcessedItem] = LruCache(
            capacity_bytes, lambda _, item: get_num_bytes(item.kwargs)
        )
        self._flights: SingleFlight[str, FinishedItem] = SingleFlight()
        self._lock = threading.Lock()  # of the numbers below
        self._num_items = 0
        self._num_tried = towers.num_encoded  # items that were encoded as a trial before
        self._num_asked = self._num_kept = self._num_processed = 0

    def encode(self, job: ItemJob, media: object) -> FinishedItem:
        """Encode a media item, wait for it, and return it with its encoder output.

        Raise `RequestError` if the item is at fault, and `CapacityError` at overload or timeout.
        """
        kept = self._kept.get(job.mm_hash)
        with self._lock:
            self._num_asked += 1
            self._num_kept += kept is not None
        if kept is not None:
            return _finish(kept, {})
        with self._entering():
            try:
                return self._flights.get(
                    job.mm_hash,
                    partial(self._start, job, media),
                    timeout_s=self._limits.flight_timeout_s,
                )
            except TimeoutError as error:
                raise CapacityError("the media item could not be encoded in time") from error

    def clear_cache(self) -> None:
        """Forget all results. Results of items in progress are still kept when they are ready."""
        self._kept.clear()

    def get_counts(self) -> EncoderCounts:
        with self._lock:
            return EncoderCounts(
                num_asked=self._num_asked,
                num_kept=self._num_kept,
                num_processed=self._num_processed,
                num_encoded=self._towers.num_encoded - self._num_tried,
            )

    @contextmanager
    def _entering(self) -> Iterator[None]:
        with self._lock:
            if self._num_items >= self._max_items:
                raise CapacityError(
                    f"the encoder works on {self._max_items} media items already: try again later"
                )
            self._num_items += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_items -= 1

    def _start(self, job: ItemJob, media: object) -> Flight:
        kept = self._kept.get(job.mm_hash)  # another call may have put it there since
        if kept is not None:
            return FinishedFlight(_finish(kept, {}))
        flight: Flight = Future()
        stored = None
        if self._tiers is not None:
            check = partial(self._check_stored, job)
            stored = self._tiers.load_item(job.mm_hash, takes_encoded=True, check=check)
        if stored is not None:
            self._encode(flight, FinishedItem(result=stored, times={}, is_stored=True))
            return flight
        processed = self._backend.start(job, media)
        processed.add_done_callback(partial(self._on_processed, flight))
        return flight

    def _on_processed(self, flight: Flight, processed: Flight) -> None:
        if processed.cancelled():
            flight.cancel()
        elif (error := processed.exception()) is not None:
            _fail(flight, error)
        else:
            with self._lock:
                self._num_processed += 1
            self._encode(flight, processed.result())

    def _encode(self, flight: Flight, finished: FinishedItem) -> None:
        item = finished.result
        if not isinstance(item, ProcessedItem) or item.layout is None:
            _fail(flight, InvariantError("an item to be encoded has no tensors or no layout"))
            return
        if ENCODED in item.kwargs:  # it came from a tier
            self._kept.put(item.mm_hash, item)
            flight.set_result(_finish(item, finished.times))
            return
        encoded = self._towers.submit(item)
        encoded.add_done_callback(partial(self._on_encoded, flight, finished, item))

    def _on_encoded(
        self,
        flight: Flight,
        finished: FinishedItem,
        item: ProcessedItem,
        encoded: Future[torch.Tensor],
    ) -> None:
        if (error := encoded.exception()) is not None:
            _fail(flight, error)
            return
        # Copies, because all tensors of an item may be views of one block of memory, which would
        # stay with its pixels for as long as one of the views is kept.
        small = {name: each.clone() for name, each in item.kwargs.items() if is_small(each)}
        ready = ProcessedItem(
            modality=item.modality,
            mm_hash=item.mm_hash,
            kwargs={**small, ENCODED: encoded.result()},
            layout=item.layout,
        )
        self._kept.put(item.mm_hash, ready)
        if self._tiers is not None:
            self._save(self._tiers, item, encoded.result(), is_new=not finished.is_stored)
        with suppress(InvalidStateError):  # it was cancelled meanwhile
            flight.set_result(_finish(ready, finished.times))

    def _save(
        self, tiers: MediaTiers, item: ProcessedItem, encoded: torch.Tensor, *, is_new: bool
    ) -> None:
        num_bytes = get_num_bytes(item.kwargs)
        if is_new:
            handle = ItemHandle(
                modality=item.modality,
                mm_hash=item.mm_hash,
                layout=item.layout,
                num_bytes=num_bytes,
            )
            tiers.save_item(handle, lambda: nullcontext(item.kwargs), num_bytes)
        tiers.save_encoded(item.mm_hash, encoded)


def _finish(item: ProcessedItem, times: ItemTimes) -> FinishedItem:
    return FinishedItem(result=item, times=times, is_stored=True)


def _fail(flight: Flight, error: BaseException) -> None:
    with suppress(InvalidStateError):  # it was cancelled meanwhile
        flight.set_exception(error)
