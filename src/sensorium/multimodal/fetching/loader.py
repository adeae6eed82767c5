"""Loads the encoded bytes of media items, wherever they come from. Nothing is decoded here.

Raw bytes and `data:` URLs are taken at once in the caller's thread. http(s) URLs are fetched on an
event loop, and `file:` URLs are read in a bounded number of threads that serve nothing else. The
caller's thread is not needed meanwhile.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeGuard

from sensorium.multimodal.fetching.addresses import AllowedDomains, Resolve, resolve_host
from sensorium.multimodal.fetching.fetch import (
    FetchCounters,
    FetchStatistics,
    RefusedMediaError,
    SourceKind,
    refuse_above,
)
from sensorium.multimodal.fetching.local_media import decode_data_url, read_local_file
from sensorium.multimodal.fetching.responses import MODALITIES, ResponseCache
from sensorium.multimodal.media import LoadedMedia, MediaBytes, MediaLimits
from sensorium.types.errors import RequestError, StoppingError
from sensorium.utils.pausing import Pausing, run_through, when_all_end

if TYPE_CHECKING:
    import ssl

    from sensorium.multimodal.fetching.fetch import FetchShares
    from sensorium.multimodal.fetching.fetcher import Fetcher
    from sensorium.multimodal.fetching.http_client import Connect

MediaSource = bytes | bytearray | memoryview | str
_Address = tuple[str, str]  # a URL and a modality
_CLOSED = "media can't be loaded: the server is stopping"
_NUM_FILE_THREADS = 16


class MediaLoader:
    """A loader that several threads may use.

    `resolve` and `connect` stand between it and the network, and every address that is connected to
    has been checked. An item has `limits.deadline_s` from the moment at which its turn comes,
    within the time of its request.
    """

    def __init__(
        self,
        limits: MediaLimits,
        *,
        resolve: Resolve = resolve_host,
        connect: Connect | None = None,
        ssl_context: ssl.SSLContext | None = None,
        response_cache_bytes: int = 256 * 2**20,
        shares: FetchShares | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._limits = limits
        self._domains = AllowedDomains(limits.allowed_domains)
        self._resolve = resolve
        self._connect = connect
        self._ssl_context = ssl_context
        self._clock = clock
        self._shares = shares
        self._counters = FetchCounters()
        self._cache = ResponseCache(response_cache_bytes)
        self._file_threads = ThreadPoolExecutor(_NUM_FILE_THREADS, thread_name_prefix="media-file")
        self._fetcher: Fetcher | None = None
        self._fetcher_lock = threading.Lock()
        self._is_closed = False

    def load(
        self, source: MediaSource, modality: str, *, cancelled: Future[None] | None = None
    ) -> MediaBytes:
        """Return the bytes of one item, or raise what is wrong with it."""
        (loaded,) = self.load_all([(source, modality)], cancelled=cancelled)
        if isinstance(loaded.outcome, RequestError):
            raise loaded.outcome
        return loaded.outcome

    def load_all(
        self,
        items: Sequence[tuple[MediaSource, str]],
        *,
        cancelled: Future[None] | None = None,
    ) -> list[LoadedMedia]:
        """Do what `load_pausing` does, and wait for it in this thread."""
        return run_through(self.load_pausing(items, cancelled=cancelled))

    def load_pausing(
        self,
        items: Sequence[tuple[MediaSource, str]],
        *,
        cancelled: Future[None] | None = None,
    ) -> Pausing[list[LoadedMedia]]:
        """Load the items of one request; pause while hosts and disks are waited for.

        Return one result per item, in their order; a URL that is named twice is loaded once. Raise
        `CancelledError` soon after `cancelled` completes, if anything is waited for.
        """
        remote = list(
            dict.fromkeys(
                (source, modality)
                for source, modality in items
                if _is_remote(source) and modality in MODALITIES
            )
        )
        started = self._start(remote, cancelled)
        try:
            if started:
                yield when_all_end(started.values())
            found = {
                address: entry
                for addresses, future in started.items()
                for address, entry in zip(addresses, future.result(), strict=True)
            }
        except CancelledError as error:
            if cancelled is not None and cancelled.done():
                raise
            raise StoppingError(_CLOSED) from error
        finally:  # also when the work is closed while it pauses
            for future in started.values():
                future.cancel()
        loaded = {address: self._account(address[0], entry) for address, entry in found.items()}
        return [
            loaded[source, modality]
            if _is_remote(source) and (source, modality) in loaded
            else self._load_here(source, modality)
            for source, modality in items
        ]

    def prepare(self) -> None:
        """Make what fetching needs, before the first URL comes."""
        self._get_fetcher()

    def statistics(self) -> FetchStatistics:
        return self._counters.statistics()

    def close(self) -> None:
        """End all fetches and threads. A file that is being read is not waited for."""
        self._file_threads.shutdown(wait=False, cancel_futures=True)
        with self._fetcher_lock:
            self._is_closed = True
            if self._fetcher is not None:
                self._fetcher.close()
        self._cache.clear()

    def _start(
        self, remote: Sequence[_Address], cancelled: Future[None] | None
    ) -> dict[tuple[_Address, ...], Future[list[LoadedMedia]]]:
        """Start to load what has to be waited for; cancel it when `cancelled` completes."""
        urls = tuple(address for address in remote if _get_scheme(address[0]) != "file")
        files = [address for address in remote if _get_scheme(address[0]) == "file"]
        started: dict[tuple[_Address, ...], Future[list[LoadedMedia]]] = {}
        try:
            if urls:
                started[urls] = self._get_fetcher().start(urls)
            for file in files:
                started[(file,)] = self._file_threads.submit(self._read_file, file[0])
        except RuntimeError as error:  # executors and the loop raise this after they were closed
            raise StoppingError(_CLOSED) from error
        if cancelled is not None:
            for future in started.values():
                cancelled.add_done_callback(_make_cancel(future))
        return started

    def _load_here(self, source: MediaSource, modality: str) -> LoadedMedia:
        """Load an item that needs no waiting."""
        began = time.monotonic()
        outcome: MediaBytes | RequestError
        try:
            outcome = self._take(source, modality)
        except RequestError as error:
            outcome = error
        return self._account(source, _finish(outcome, began))

    def _read_file(self, source: str) -> list[LoadedMedia]:
        began = time.monotonic()
        limits = self._limits
        outcome: MediaBytes | RequestError
        try:
            outcome = MediaBytes(
                read_local_file(
                    source, allowed_path=limits.allowed_local_path, max_bytes=limits.max_bytes
                )
            )
        except RequestError as error:
            outcome = error
        return [_finish(outcome, began)]

    def _account(self, source: MediaSource, loaded: LoadedMedia) -> LoadedMedia:
        """Count what was loaded or refused. Media without a byte is refused here."""
        outcome = loaded.outcome
        if isinstance(outcome, MediaBytes) and not outcome.data:
            outcome = RefusedMediaError("the media is empty", "empty")
            loaded = LoadedMedia(outcome=outcome, fetch_s=loaded.fetch_s)
        if isinstance(outcome, MediaBytes):
            self._counters.add_loaded(_get_kind(source), len(outcome.data))
        else:
            reason = outcome.reason if isinstance(outcome, RefusedMediaError) else "malformed"
            self._counters.add_refusal(reason)
        return loaded

    def _take(self, source: MediaSource, modality: str) -> MediaBytes:
        if modality not in MODALITIES:
            raise RequestError(f"media is an image, a video or audio, not {modality!r}")
        if isinstance(source, str):
            if _get_scheme(source) == "data":
                return MediaBytes(decode_data_url(source, self._limits.max_bytes))
            raise RequestError(
                "media URLs start with data:, http:, https: or file: (for a path: give the file's "
                "bytes, or a file: URL below allowed_local_media_path)"
            )
        if not isinstance(source, bytes | bytearray | memoryview):
            raise RequestError(f"media is bytes or a URL, not {type(source).__name__}")
        refuse_above(self._limits.max_bytes, memoryview(source).nbytes)
        return MediaBytes(source if isinstance(source, bytes) else bytes(source))

    def _get_fetcher(self) -> Fetcher:
        """Return the fetcher, which is made when it is first needed because it imports httpx.

        Raise `RuntimeError` if the loader was closed.
        """
        with self._fetcher_lock:
            if self._is_closed:
                raise RuntimeError(_CLOSED)
            if self._fetcher is None:
                from sensorium.multimodal.fetching.fetcher import Fetcher
                from sensorium.multimodal.fetching.http_client import HttpClient, connect_socket

                client = HttpClient(
                    self._limits,
                    domains=self._domains,
                    resolve=self._resolve,
                    connect=self._connect or connect_socket,
                    cache=self._cache,
                    counters=self._counters,
                    clock=self._clock,
                    ssl_context=self._ssl_context,
                )
                self._fetcher = Fetcher(self._limits, client, shares=self._shares)
            return self._fetcher


def _get_scheme(source: str) -> str:
    return source[:8].partition(":")[0].lower()


def _get_kind(source: MediaSource) -> SourceKind:
    """Return the kind under which a loaded source is counted."""
    if not isinstance(source, str):
        return "bytes"
    scheme = source[:4].lower()
    return "data" if scheme == "data" else "file" if scheme == "file" else "http"


def _is_remote(source: MediaSource) -> TypeGuard[str]:
    """Return True if loading the source may have to wait."""
    return isinstance(source, str) and _get_scheme(source) in ("http", "https", "file")


def _finish(outcome: MediaBytes | RequestError, began: float) -> LoadedMedia:
    return LoadedMedia(outcome=outcome, fetch_s=time.monotonic() - began)


def _make_cancel(future: Future[list[LoadedMedia]]) -> Callable[[object], None]:
    """Return a callback that cancels the future, but does not keep its result alive."""
    reference = weakref.ref(future)

    def cancel(_: object) -> None:
        if (found := reference()) is not None:
            found.cancel()

    return cancel
