"""Gives large media items to a remote encoder, which runs in a process of its own.

The encoder takes the source of an item, and answers with the item as the engine's core takes it
after encoding: its layout, its small tensors and its encoder output. The transport is up to the
`EncoderService`.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from PIL import Image

from sensorium.multimodal.media import MediaBytes
from sensorium.multimodal.processing.item_backend import FinishedItem, ItemBackend
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.single_flight import Flight
from sensorium.types.errors import CapacityError, StoppingError
from sensorium.types.multimodal import REMOTE_ENCODER_OUTCOMES

_NUM_FALLBACKS = 8  # items that may wait for the engine's own backend at once


class EncoderService(Protocol):
    """A connection to a remote encoder, which several threads may use."""

    def encode(self, job: ItemJob, media: object) -> Future[FinishedItem]:
        """Begin to encode an item, and return a future of the item with its encoder output.

        The future ends within a bounded time. It fails with a `RequestError` if the item is at
        fault, and with a `CapacityError` if the encoder has no room or can't be reached.
        """
        ...

    def close(self) -> None:
        """Close the connection, so that items which still wait for an answer fail."""
        ...


class RemoteEncoderBackend:
    """A backend that gives items of more than `above` bytes to a remote encoder.

    All other items go to `local`, the engine's own backend. With `has_fallback`, `local` also gets
    the items that the encoder can't take, because it has no room or can't be reached. It gets these
    in threads of this backend, because it may wait for room or do the whole work at once, and the
    thread that receives an encoder's answer may run an event loop.
    """

    def __init__(
        self, local: ItemBackend, service: EncoderService, *, above: int, has_fallback: bool
    ) -> None:
        self._local = local
        self._service = service
        self._above = above
        self._has_fallback = has_fallback
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(_NUM_FALLBACKS, thread_name_prefix="fallback")

    def close(self) -> None:
        """End the threads that give items to `local`; the items that wait for a thread fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def get_counts(self) -> dict[str, int]:
        """Return how many items for the encoder have had each outcome so far."""
        with self._lock:
            return {outcome: self._counts[outcome] for outcome in REMOTE_ENCODER_OUTCOMES}

    def start(self, job: ItemJob, media: object) -> Flight:
        if job.is_decoded_only or count_bytes(media) <= self._above:
            return self._local.start(job, media)
        flight: Flight = Future()
        asked = self._service.encode(job, media)
        asked.add_done_callback(partial(self._finish, flight, job, media))
        flight.add_done_callback(lambda ended: ended.cancelled() and asked.cancel())
        return flight

    def _finish(
        self, flight: Flight, job: ItemJob, media: object, asked: Future[FinishedItem]
    ) -> None:
        if asked.cancelled() or flight.done():
            flight.cancel()
            return
        error = asked.exception()
        if error is None:
            self._count("encoded")
            _settle(flight, asked.result(), None)
        elif isinstance(error, CapacityError) and self._has_fallback:
            self._fall_back(flight, job, media)
        else:
            self._count("failed" if isinstance(error, CapacityError) else "refused")
            _settle(flight, None, error)

    def _fall_back(self, flight: Flight, job: ItemJob, media: object) -> None:
        """Give an item to the engine's own backend, in another thread than this one."""

        def check(started: Future[None]) -> None:
            if started.cancelled():
                _settle(flight, None, StoppingError("the engine is closed"))

        try:
            started = self._threads.submit(self._start_here, flight, job, media)
        except RuntimeError:  # it was closed
            _settle(flight, None, StoppingError("the engine is closed"))
            return
        self._count("fallback")
        started.add_done_callback(check)

    def _start_here(self, flight: Flight, job: ItemJob, media: object) -> None:
        if flight.cancelled():
            return
        try:
            local = self._local.start(job, media)
        except BaseException as error:
            _settle(flight, None, error)
            return
        local.add_done_callback(partial(_follow, flight))
        flight.add_done_callback(lambda ended: ended.cancelled() and local.cancel())

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._counts[outcome] += 1


def _follow(flight: Flight, other: Flight) -> None:
    if other.cancelled():
        flight.cancel()
        return
    error = other.exception()
    _settle(flight, None if error is not None else other.result(), error)


def _settle(flight: Flight, result: Any, error: BaseException | None) -> None:
    with suppress(InvalidStateError):  # it was cancelled meanwhile
        if error is None:
            flight.set_result(result)
        else:
            flight.set_exception(error)


def count_bytes(media: Any) -> int:
    """Return the size of a media item as it was given: of its file, pixels or samples."""
    if isinstance(media, MediaBytes):
        return len(media.data)
    if isinstance(media, tuple) and len(media) == 2 and isinstance(media[1], int | float | dict):
        media = media[0]  # the second entry is a rate, or the metadata of frames
    if isinstance(media, list | tuple):
        return sum(map(count_bytes, media))
    if isinstance(media, Image.Image):
        return media.width * media.height * len(media.getbands())
    num_bytes = getattr(media, "nbytes", 0)
    return num_bytes if isinstance(num_bytes, int) else 0
