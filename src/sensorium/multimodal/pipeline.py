"""Turns the media of a request into handles in a cache, and processes every item once.

Sources are fetched together, hashed before anything is decoded, and looked up. An item that no
cache has is processed once, even if several requests ask for it meanwhile. Owns the flights
(`single_flight`): each is the running computation of one item, for which several requests may wait.
Several threads may use a pipeline. A call blocks until all items of its request are processed, but
can give up its thread while sources are fetched (`utils.pausing`).

Invariants:
  1. A cache hit decodes nothing and calls no processor.
  2. A call that fails holds nothing: its handles are released, and it leaves its flights.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from sensorium.multimodal.cache.interface import ItemHandle, ProcessorCache
from sensorium.multimodal.cache.item_table import ItemTable
from sensorium.multimodal.cache.shm import ShmSender
from sensorium.multimodal.decoding.decoding import DecodeOptions, resolve_options
from sensorium.multimodal.fetching.loader import MediaLoader
from sensorium.multimodal.media import MediaBytes, MediaItem, MediaLimits, ProcessingOptions
from sensorium.multimodal.names import BoundSource, MediaHasher, UuidBindings, UuidScope
from sensorium.multimodal.processing.checks import check_unread
from sensorium.multimodal.processing.item_backend import FinishedItem, ItemBackend
from sensorium.multimodal.processing.item_worker import ItemJob, StageTimes, add_times
from sensorium.multimodal.processing.layouts import SizeLayouts
from sensorium.multimodal.single_flight import FinishedFlight, Flight, SingleFlight, Waiter
from sensorium.multimodal.tiers.tiers import MediaTiers
from sensorium.types.errors import (
    CapacityError,
    FieldPath,
    InvariantError,
    MissingMediaError,
    RequestError,
    at,
    format_path,
)
from sensorium.types.multimodal import ItemLayout, ItemTimes, ProcessedItem
from sensorium.utils.pausing import Pausing, run_through

_MAX_RETRIES = 3  # an item may be evicted between its processing and its first use
_Result = FinishedItem | None  # None: the item is in the cache already


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedItem:
    """A media item that is ready for the engine core, with all that can process it again."""

    handle: ItemHandle  # keeps the processed item in the cache until it is released
    # The other fields are used if the engine core has lost the tensors.
    path: FieldPath  # the place of the item in its prompt, for errors
    origin: MediaItem | None = None  # the item as the caller gave it
    options: ProcessingOptions = field(default_factory=ProcessingOptions)
    brought: ProcessedItem | None = None  # the item, if the caller sent it processed
    given_hash: str | None = None  # the hash that the caller sent
    times: ItemTimes = field(default_factory=dict)  # stage -> seconds, for this request
    is_layout_only: bool = False  # there are no tensors, and the handle belongs to no cache


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlinedItem:
    """A media item before it is decoded: its source, its hash, and its layout if that is known."""

    # With its source loaded. An item with a uuid and a URL keeps the URL: the server that processes
    # it may find it by its uuid.
    item: MediaItem
    mm_hash: str = ""  # empty if the source is not loaded
    layout: ItemLayout | None = None  # None: it can't be known before the item is decoded

    @property
    def modality(self) -> str:
        return self.item.modality


@dataclass(kw_only=True, eq=False)
class MediaPipeline:
    """A pipeline that fetches, hashes and processes media items, and puts them into a cache."""

    cache: ProcessorCache
    hasher: MediaHasher
    loader: MediaLoader
    backend: ItemBackend
    uuids: UuidBindings
    limits: MediaLimits
    shared: ShmSender | None = None  # the same as `cache`, if other processes put items into it
    layouts: SizeLayouts | None = None  # for requests that need no tensors
    tiers: MediaTiers | None = None  # stores on disk or in Redis, for items that no cache has
    # Raises `RequestError` if processing the job can't have made this item of a tier.
    check_stored: Callable[[ItemJob, ProcessedItem], None] = lambda *_: None
    takes_encoded: bool = False  # the requests go to an engine that takes encoder outputs of a tier
    own_backend: ItemBackend | None = None  # of this engine, if `backend` uses a remote encoder
    remote_timeout_s: float = 0.0  # how long the remote encoder may take before `own_backend` does
    flights: SingleFlight[str, _Result] = field(default_factory=SingleFlight)

    def for_warmup(self) -> MediaPipeline:
        """Return a pipeline that processes items the same way, with a cache and uuids of its own.

        It changes nothing in this pipeline, and uses no remote encoder. The caller must close its
        `loader`.
        """
        return MediaPipeline(
            cache=ItemTable(0),
            hasher=self.hasher,
            loader=MediaLoader(self.limits),
            backend=self.own_backend or self.backend,
            uuids=UuidBindings(),
            limits=self.limits,
        )

    def process_pausing(
        self,
        items: Sequence[MediaItem],
        options: ProcessingOptions,
        *,
        needs_tensors: bool = True,
        cancelled: Future[None] | None = None,
    ) -> Pausing[list[CachedItem]]:
        """Return all items in order, and process those that the cache does not have.

        This generator pauses while sources are fetched (see `utils.pausing`). The caller must
        `release` the items. After an error nothing is held. If `cancelled` completes, the work ends
        with a `CancelledError`. If `needs_tensors` is False, an item that is not in the cache may
        have only its layout.
        """
        calls = [
            _ItemCall(self, item, options, cancelled, needs_tensors=needs_tensors) for item in items
        ]
        try:
            _run(_ItemCall.recognise, calls)
            yield from self._load([call for call in calls if call.needs_source], cancelled)
            for stage in (_ItemCall.start, _ItemCall.finish, _ItemCall.bind):
                _run(stage, calls)
        except BaseException:  # nothing is held after an error, a cancellation or a bug
            for call in calls:
                call.undo()
            raise
        return [call.get_result() for call in calls]

    def outline_pausing(
        self,
        items: Sequence[MediaItem],
        options: ProcessingOptions,
        *,
        cancelled: Future[None] | None = None,
    ) -> Pausing[list[OutlinedItem]]:
        """Load and hash the media items, and add the layouts that follow from their headers alone.

        Nothing is decoded, and no cache is read. A URL with a uuid is not loaded, because the
        server that processes the item may find it by its uuid.
        """
        calls = [_ItemCall(self, item, options, cancelled, needs_tensors=False) for item in items]
        yield from self._load([call for call in calls if call.needs_outline], cancelled)
        outlined = []
        for call in calls:
            with at(*call.item.path):
                outlined.append(call.outline())
        return outlined

    def identify_pausing(
        self, item: MediaItem, *, cancelled: Future[None] | None = None
    ) -> Pausing[tuple[MediaItem, str]]:
        """Return the item with its source loaded, and the source's digest; nothing is decoded."""
        call = _ItemCall(self, item, ProcessingOptions(), cancelled, needs_tensors=True)
        if call.needs_source:
            yield from self._load([call], cancelled)
        with at(*item.path):
            if not item.is_encoded:
                check_unread(item.modality, call.source, self.limits)
            return replace(item, media=call.source), self.hasher.digest_source(call.source)

    def release(self, items: Iterable[CachedItem]) -> None:
        """Release each item's handle, exactly once, so that the cache may evict the item."""
        self.cache.release([item.handle for item in items if not item.is_layout_only])

    def process_again(self, item: CachedItem) -> CachedItem:
        """Run `process_again_pausing` to its end, and block while the source is fetched."""
        return run_through(self.process_again_pausing(item))

    def process_again_pausing(
        self, item: CachedItem, *, cancelled: Future[None] | None = None
    ) -> Pausing[CachedItem]:
        """Return the media item with a new handle, after the engine core has lost its tensors.

        The item is processed again if the cache has lost it as well. Raise `MissingMediaError` if
        its source is not available, or if its URL has other content now.
        """
        mm_hash = item.handle.mm_hash
        if item.brought is not None:
            handle = self.cache.get_and_update_item(mm_hash, item.brought)
            if handle is not None:
                return replace(item, handle=handle)
        if item.origin is not None:
            (again,) = yield from self.process_pausing(
                [item.origin], item.options, cancelled=cancelled
            )
            if again.handle.mm_hash == mm_hash:
                return replace(again, times=add_times(item.times, again.times))
            self.cache.release([again.handle])  # the URL has other content now
        raise MissingMediaError(
            "the media item is in no cache any more: send it again",
            (item.given_hash or mm_hash,),
            item.path,
        )

    def load_stored(self, job: ItemJob, times: StageTimes) -> Flight | None:
        """Return an item from the tiers as a finished flight, or None if they do not have it.

        The time is added to `times`.
        """
        if self.tiers is None:
            return None
        with times.measure("load"):
            check = partial(self.check_stored, job)
            item = self.tiers.load_item(job.mm_hash, takes_encoded=self.takes_encoded, check=check)
        if item is None:
            return None
        return FinishedFlight(FinishedItem(result=item, times={}, is_stored=True))

    def store(self, handle: ItemHandle) -> None:
        """Keep a media item that was just processed in the tiers, if there are any."""
        if self.tiers is None or handle.layout is None:
            return
        kwargs, shared, mm_hash = handle.kwargs, self.shared, handle.mm_hash
        if kwargs is not None:
            self.tiers.save_item(handle, lambda: nullcontext(kwargs), handle.num_bytes)
        elif shared is not None:
            self.tiers.save_item(handle, lambda: shared.reading(mm_hash), 0)

    def _load(self, calls: Sequence[_ItemCall], cancelled: Future[None] | None) -> Pausing[None]:
        sources = [(call.item.media, call.item.modality) for call in calls]
        found = yield from self.loader.load_pausing(sources, cancelled=cancelled)
        for call, loaded in zip(calls, found, strict=True):
            call.times.add({"fetch": loaded.fetch_s})
            if isinstance(loaded.outcome, RequestError):
                with at(*call.item.path):
                    raise copy.copy(loaded.outcome) from loaded.outcome
            call.source = loaded.outcome


def _run(stage: Callable[[_ItemCall], None], calls: Sequence[_ItemCall]) -> None:
    """Run one stage for each media item, and add the item's field path to a `RequestError`."""
    for call in calls:
        with at(*call.item.path):
            stage(call)


class _ItemCall:
    """The stages of one item of a call: look up its uuid, or load, hash, look up and process."""

    def __init__(
        self,
        pipeline: MediaPipeline,
        item: MediaItem,
        options: ProcessingOptions,
        cancelled: Future[None] | None,
        *,
        needs_tensors: bool,
    ) -> None:
        self._pipeline = pipeline
        self._options = options
        self._cancelled = cancelled
        self._scope = UuidScope(client=options.uuid_scope, cache_salt=options.cache_salt)
        self._layouts = None if needs_tensors else pipeline.layouts
        self._is_layout_only = False
        self._handle: ItemHandle | None = None
        self._waiter: Waiter[str, _Result] | None = None
        self._job: ItemJob | None = None
        self._bound: BoundSource | None = None
        self.item = item
        self.times = StageTimes()
        is_here = isinstance(item.media, MediaBytes) or not item.is_encoded
        self.source: object | None = item.media if is_here else None

    @property
    def needs_source(self) -> bool:
        return self._handle is None and self.source is None

    @property
    def needs_outline(self) -> bool:
        """Return whether `outline` needs the source, and it is not loaded yet."""
        item = self.item
        has_name = item.uuid is not None and item.is_remote
        return self.source is None and item.media is not None and not has_name

    def outline(self) -> OutlinedItem:
        """Return the hash of the media item, and its layout if its header is enough for that."""
        item, pipeline = self.item, self._pipeline
        if self.source is None:
            if item.uuid is None:
                raise RequestError("has neither media nor a uuid: send one of them")
            return OutlinedItem(item=item)
        if not item.is_encoded:
            check_unread(item.modality, self.source, pipeline.limits)
        digest = pipeline.hasher.digest_source(self.source)
        job = self._make_job(BoundSource(digest=digest, is_encoded=item.is_encoded))
        layout = None
        if self._layouts is not None:
            layout = self._layouts.get(job, self.source, cancelled=self._cancelled)
        named = replace(item, media=self.source)
        return OutlinedItem(item=named, mm_hash=job.mm_hash, layout=layout)

    def recognise(self) -> None:
        """Look up the media item by its uuid, so that it need not be fetched if the cache has it.

        Raise `MissingMediaError` if the client sent only a uuid, and the cache has no such item.
        """
        item, pipeline = self.item, self._pipeline
        if item.uuid is not None and (item.media is None or item.is_remote):
            source = pipeline.uuids.get(item.uuid, modality=item.modality, scope=self._scope)
            if source is not None:
                with self.times.measure("hash"):
                    self._job = self._make_job(source)
                self._handle = pipeline.cache.get_and_update_item(self._job.mm_hash)
                self._bound = None if self._handle is None else source
        if item.media is None and self._handle is None:
            if item.uuid is None:
                raise RequestError("has neither media nor a uuid: send one of them")
            raise MissingMediaError(
                f"the media of uuid {item.uuid!r} is in no cache: send the media", (item.uuid,)
            )

    def start(self) -> None:
        """Hash the source, and begin to process the item if the cache does not have it."""
        if self._handle is not None:
            return
        pipeline, item = self._pipeline, self.item
        if not item.is_encoded:
            check_unread(item.modality, self.source, pipeline.limits)
        with self.times.measure("hash"):
            digest = pipeline.hasher.digest_source(self.source)
        self._bound = BoundSource(digest=digest, is_encoded=item.is_encoded)
        if item.uuid is not None:
            pipeline.uuids.check(item.uuid, self._bound, modality=item.modality, scope=self._scope)
        with self.times.measure("hash"):
            self._job = self._make_job(self._bound)
        self._handle = pipeline.cache.get_and_update_item(self._job.mm_hash)
        if self._handle is None and self._layouts is not None:
            self._lay_out(self._layouts, self._job)
        if self._handle is None:
            self._join()

    def _lay_out(self, layouts: SizeLayouts, job: ItemJob) -> None:
        """Compute only the layout of the media item, if that is possible without its tensors."""
        layout = layouts.get(job, self.source, cancelled=self._cancelled)
        if layout is not None:
            self._is_layout_only = True
            self._handle = ItemHandle(
                modality=job.modality, mm_hash=job.mm_hash, layout=layout, num_bytes=0, is_hit=False
            )

    def _make_job(self, source: BoundSource) -> ItemJob:
        item, options = self.item, self._options
        processor_kwargs = dict(options.processor_kwargs)
        decode_options: DecodeOptions | None = None
        if source.is_encoded:
            processor_kwargs, decode_options = resolve_options(
                item.modality, options.processor_kwargs, options.media_io_kwargs
            )
        mm_hash = self._pipeline.hasher.name_item(
            source.digest,
            modality=f"{item.modality}/decoded" if options.is_decoded_only else item.modality,
            decode_options=decode_options,
            processor_kwargs=processor_kwargs,
            cache_salt=options.cache_salt,
        )
        return ItemJob(
            mm_hash=mm_hash,
            modality=item.modality,
            decode_options=decode_options,
            processor_kwargs=processor_kwargs,
            is_decoded_only=options.is_decoded_only,
        )

    def _join(self) -> None:
        pipeline, job, source = self._pipeline, self._get_job(), self.source

        def start() -> Flight:
            if pipeline.cache.is_cached(
                job.mm_hash
            ):  # another request has put it there since the look-up
                return FinishedFlight(None)
            stored = pipeline.load_stored(job, self.times)
            return pipeline.backend.start(job, source) if stored is None else stored

        self._waiter = pipeline.flights.join(job.mm_hash, start)

    def finish(self) -> None:
        """Wait until the media item is processed, and get a handle on it for this request.

        Raise `CapacityError` if it is evicted each time before this request can use it.
        """
        for attempt in range(1 + _MAX_RETRIES):
            if attempt:
                self._join()
            if self._waiter is not None:
                self._take(self._waiter)
            if self._handle is None:
                self._handle = self._pipeline.cache.get_and_update_item(self._get_job().mm_hash)
            if self._handle is not None:
                return
        raise CapacityError(
            "the cache of processed media is too busy to keep the media item: try again later"
        )

    def _take(self, waiter: Waiter[str, _Result]) -> None:
        """Wait for the processing of the media item, and put the result into the cache.

        The flight is left only when the cache has the item, so that a later request finds either
        the flight or the item.
        """
        pipeline, mm_hash = self._pipeline, self._get_job().mm_hash
        began = time.monotonic()
        try:
            # A flight has a deadline of its own, but it may be started again.
            timeout_s = pipeline.limits.flight_timeout_s + pipeline.remote_timeout_s
            finished = waiter.result(timeout_s=timeout_s, cancelled=self._cancelled)
        except TimeoutError as error:  # it is not known here what took so long
            raise CapacityError(
                "the media item could not be processed in time: try again later"
            ) from error
        if not waiter.is_leader:
            self.times.add({"wait": time.monotonic() - began})
        elif finished is not None:
            self.times.add(finished.times)
        result = None if finished is None else finished.result
        if isinstance(result, ProcessedItem):
            self._handle = pipeline.cache.get_and_update_item(mm_hash, result)
        elif result is not None and pipeline.shared is not None and waiter.is_leader:
            self._handle = pipeline.shared.adopt(mm_hash, result)
        # In all other cases the cache has the item, and `finish` finds it there.
        if self._handle is not None and waiter.is_leader and finished and not finished.is_stored:
            pipeline.store(self._handle)
        waiter.leave()
        self._waiter = None

    def bind(self) -> None:
        """Bind the item's uuid to its source, so that a later request may send only the uuid.

        It is not bound if only the layout was computed: the source was not decoded, and may be
        damaged.
        """
        item, uuids = self.item, self._pipeline.uuids
        if item.uuid is not None and self._bound is not None and not self._is_layout_only:
            uuids.bind(item.uuid, self._bound, modality=item.modality, scope=self._scope)

    def undo(self) -> None:
        """Release the handle and leave the flight, after an error in the request."""
        if self._waiter is not None:
            self._waiter.leave()
        if self._handle is not None and not self._is_layout_only:
            self._pipeline.cache.release([self._handle])

    def get_result(self) -> CachedItem:
        if self._handle is None:
            raise InvariantError(f"media item {format_path(self.item.path)} is not processed yet")
        tiers = self._pipeline.tiers
        if tiers is not None and self._handle.is_hit:
            tiers.note_use(self._handle.mm_hash)
        origin = self.item if self.source is None else replace(self.item, media=self.source)
        return CachedItem(
            handle=self._handle,
            path=self.item.path,
            origin=origin,
            options=self._options,
            times=self.times.get(),
            is_layout_only=self._is_layout_only,
        )

    def _get_job(self) -> ItemJob:
        if self._job is None:
            raise InvariantError(f"media item {format_path(self.item.path)} has no hash yet")
        return self._job
