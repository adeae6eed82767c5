"""The encoded bytes of media items, wherever they come from; nothing is decoded here.

Raw bytes and `data:` URLs are taken at once in the caller's thread; several http(s) and `file:`
URLs of one call are loaded side by side in a bounded number of threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from sensorium.multimodal.media.address_guard import Resolve, resolve_host
from sensorium.multimodal.media.data_url import decode_data_url
from sensorium.multimodal.media.fetch_statistics import FetchCounters, FetchStatistics, SourceKind
from sensorium.multimodal.media.hosts import AllowedDomains
from sensorium.multimodal.media.limits import MediaLimits
from sensorium.multimodal.media.local_file import read_local_file
from sensorium.multimodal.media.media_bytes import MediaBytes
from sensorium.multimodal.media.refusal import RefusedMediaError, refuse_above
from sensorium.multimodal.media.response_cache import ResponseCache
from sensorium.multimodal.media.response_checks import MODALITIES
from sensorium.types.errors import CapacityError, RequestError

if TYPE_CHECKING:
    import socket
    import ssl

    from sensorium.multimodal.media.http_client import HttpClient

MediaSource = bytes | bytearray | memoryview | str
_CLOSED = "media can't be loaded: the server is stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedMedia:
    """What came of one item, and how long that took from the moment that its turn came."""

    outcome: MediaBytes | RequestError
    fetch_s: float


class MediaLoader:
    """Thread-safe. `resolve` and `connect` stand between this and the network; every address that
    is connected to has been checked. Each item has the whole of `limits.deadline_s`, from the
    moment that its turn comes.
    """

    def __init__(
        self,
        limits: MediaLimits,
        *,
        resolve: Resolve = resolve_host,
        connect: Callable[[str, int, float], socket.socket] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        response_cache_bytes: int = 256 * 2**20,
        num_threads: int = 16,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._limits = limits
        self._domains = AllowedDomains(limits.allowed_domains)
        self._resolve = resolve
        self._connect = connect
        self._ssl_context = ssl_context
        self._clock = clock
        self._num_threads = num_threads
        self._counters = FetchCounters()
        self._cache = ResponseCache(response_cache_bytes)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="media")
        self._client: HttpClient | None = None
        self._client_lock = threading.Lock()

    def load(
        self, source: MediaSource, modality: str, *, cancelled: Future[None] | None = None
    ) -> MediaBytes:
        """Raises `CancelledError` soon after `cancelled` completes, if a host is waited for."""
        try:
            media = self._load(source, modality, cancelled)
            if not media.data:
                raise RefusedMediaError("the media is empty", "empty")
            self._counters.add_loaded(_get_kind(source), len(media.data))
        except RequestError as error:
            reason = error.reason if isinstance(error, RefusedMediaError) else "malformed"
            self._counters.add_refusal(reason)
            raise
        return media

    def load_all(
        self,
        items: Sequence[tuple[MediaSource, str]],
        *,
        cancelled: Future[None] | None = None,
    ) -> list[LoadedMedia]:
        """One result per item, in their order; a URL that is named twice is loaded once. As
        `load`: what nobody waits for holds up nobody else.
        """
        started: dict[tuple[str, str], Future[LoadedMedia]] = {}
        for source, modality in items:
            if _is_remote(source) and (source, modality) not in started:
                started[source, modality] = self._submit(source, modality, cancelled)
        if cancelled is not None:
            cancelled.add_done_callback(lambda _: [each.cancel() for each in started.values()])
        results: list[LoadedMedia] = []
        for source, modality in items:
            try:
                if _is_remote(source):
                    results.append(started[source, modality].result())
                else:
                    results.append(self._try_to_load(source, modality))
            except CancelledError as error:
                if cancelled is not None and cancelled.done():
                    raise
                raise CapacityError(_CLOSED) from error
        return results

    def _try_to_load(
        self, source: MediaSource, modality: str, cancelled: Future[None] | None = None
    ) -> LoadedMedia:
        began = time.monotonic()
        outcome: MediaBytes | RequestError
        try:
            outcome = self.load(source, modality, cancelled=cancelled)
        except RequestError as error:
            outcome = error
        return LoadedMedia(outcome=outcome, fetch_s=time.monotonic() - began)

    def _submit(
        self, source: str, modality: str, cancelled: Future[None] | None
    ) -> Future[LoadedMedia]:
        try:
            return self._threads.submit(self._try_to_load, source, modality, cancelled)
        except RuntimeError as error:  # the executor's word for being shut down
            raise CapacityError(_CLOSED) from error

    def prepare(self) -> None:
        """What addresses need, before the first of them comes."""
        self._get_client()

    def statistics(self) -> FetchStatistics:
        return self._counters.statistics()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._client_lock:
            if self._client is not None:
                self._client.close()
        self._cache.clear()

    def _load(
        self, source: MediaSource, modality: str, cancelled: Future[None] | None
    ) -> MediaBytes:
        if modality not in MODALITIES:
            raise RequestError(f"media is an image, a video or audio, not {modality!r}")
        if isinstance(source, str):
            return self._load_url(source, modality, cancelled)
        if not isinstance(source, bytes | bytearray | memoryview):
            raise RequestError(f"media is bytes or a URL, not {type(source).__name__}")
        refuse_above(self._limits.max_bytes, memoryview(source).nbytes)
        return MediaBytes(source if isinstance(source, bytes) else bytes(source))

    def _load_url(self, source: str, modality: str, cancelled: Future[None] | None) -> MediaBytes:
        scheme = source[:8].partition(":")[0].lower()
        if scheme == "data":
            return MediaBytes(decode_data_url(source, self._limits.max_bytes))
        if scheme == "file":
            allowed_path = self._limits.allowed_local_path
            max_bytes = self._limits.max_bytes
            return MediaBytes(
                read_local_file(source, allowed_path=allowed_path, max_bytes=max_bytes)
            )
        if scheme in ("http", "https"):
            return self._get_client().fetch(source, modality, cancelled=cancelled)
        raise RequestError(
            "media URLs start with data:, http:, https: or file: (for a path: give the file's "
            "bytes, or a file: URL below allowed_local_media_path)"
        )

    def _get_client(self) -> HttpClient:
        """Made when it is first needed: it brings httpx along."""
        with self._client_lock:
            if self._client is None:
                from sensorium.multimodal.media.http_client import HttpClient
                from sensorium.multimodal.media.pinned_connection import connect_socket

                self._client = HttpClient(
                    self._limits,
                    domains=self._domains,
                    resolve=self._resolve,
                    connect=self._connect or connect_socket,
                    cache=self._cache,
                    counters=self._counters,
                    clock=self._clock,
                    num_threads=self._num_threads,
                    ssl_context=self._ssl_context,
                )
            return self._client


def _get_kind(source: MediaSource) -> SourceKind:
    """Of a source that was loaded."""
    if not isinstance(source, str):
        return "bytes"
    scheme = source[:4].lower()
    return "data" if scheme == "data" else "file" if scheme == "file" else "http"


def _is_remote(source: MediaSource) -> TypeGuard[str]:
    """Whether loading it may have to wait."""
    return isinstance(source, str) and source[:5].lower() != "data:"
