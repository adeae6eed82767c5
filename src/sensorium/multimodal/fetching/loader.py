"""Loads the encoded bytes of media items from all kinds of sources. Nothing is decoded here.

Raw bytes and `data:` URLs are read at once in the caller's thread. http(s) URLs are fetched on an
event loop, and `file:` URLs are read in a bounded number of threads that do nothing else. The
caller's thread is free meanwhile.

In a `data:` URL, strict base64 is decoded straight from the string. Other forms that browsers and
clients send (line breaks, the URL-safe alphabet, missing padding, percent-encoded `+`, `/` and `=`)
are normalised only after the strict decoding has failed.

Invariants of files:
  1. Only regular files below the allowed directory are read. Symbolic links are resolved first and
     the result is checked. The resolved path is then opened part by part without following links,
     so that a link made in between leads nowhere.
  2. A client can't learn what else exists on the disk: all failures have one text.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard
from urllib.parse import unquote_to_bytes, urlsplit

import pybase64

from sensorium.multimodal.fetching.fetch import (
    Address,
    FetchCounters,
    FetchShares,
    FetchStatistics,
    RefusedMediaError,
    SourceKind,
    refuse_above,
)
from sensorium.multimodal.fetching.hosts import (
    MODALITIES,
    AllowedDomains,
    Resolve,
    ResponseCache,
    resolve_host,
)
from sensorium.multimodal.media import LoadedMedia, MediaBytes, MediaLimits
from sensorium.types.errors import RequestError, StoppingError
from sensorium.utils.pausing import Pausing, when_all_end

if TYPE_CHECKING:
    import ssl

    from sensorium.multimodal.fetching.http_client import Connect, Fetcher

MediaSource = bytes | bytearray | memoryview | str | os.PathLike[str]
_CLOSED = "media can't be loaded: the server is stopping"
_NUM_FILE_THREADS = 16


class MediaLoader:
    """A thread-safe loader of media items, from bytes or from `data:`, `http(s):` and `file:` URLs.

    All network traffic goes through `resolve` and `connect`, and only checked addresses are
    connected to. An item must arrive within `limits.deadline_s` after its fetch was allowed to
    begin, and within the time limit of its request.
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
        counters = self._counters = FetchCounters()
        cache = self._cache = ResponseCache(response_cache_bytes)
        self._file_threads = ThreadPoolExecutor(_NUM_FILE_THREADS, thread_name_prefix="media-file")
        self._fetcher: Fetcher | None = None
        self._fetcher_lock = threading.Lock()
        self._is_closed = False
        domains = AllowedDomains(limits.allowed_domains)

        def make_fetcher() -> Fetcher:
            # Imported when it is first needed, because httpx takes long to import.
            from sensorium.multimodal.fetching.http_client import (
                Fetcher,
                HttpClient,
                connect_socket,
            )

            client = HttpClient(
                limits=limits,
                domains=domains,
                resolve=resolve,
                connect=connect or connect_socket,
                cache=cache,
                counters=counters,
                clock=clock,
                given_ssl_context=ssl_context,
            )
            return Fetcher(client, shares or FetchShares())

        self._make_fetcher = make_fetcher

    def load_pausing(
        self, items: Sequence[tuple[MediaSource, str]], *, cancelled: Future[None] | None = None
    ) -> Pausing[list[LoadedMedia]]:
        """Load the media items of one request, as a generator that pauses while it has to wait.

        `items` are pairs of a source and a modality. The generator yields futures to wait for, and
        returns one result per item, in their order: its bytes, or the error. A URL that occurs
        twice is loaded once. If `cancelled` completes while the generator waits, it raises
        `CancelledError` soon after. Raise `StoppingError` if the loader was closed.
        """
        remote = [(s, m) for s, m in items if _is_remote(s) and m in MODALITIES]
        started = self._start(list(dict.fromkeys(remote)), cancelled)
        try:
            if started:
                yield when_all_end(started.values())
            loaded = {
                address: self._account(address[0], entry)
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
        return [
            loaded[source, modality]
            if _is_remote(source) and (source, modality) in loaded
            else self._account(source, self._load_here(source, modality)[0])
            for source, modality in items
        ]

    def prepare(self) -> None:
        """Create the HTTP client and its thread now, so that the first URL does not wait for it."""
        self._get_fetcher()

    def statistics(self) -> FetchStatistics:
        return self._counters.statistics()

    def close(self) -> None:
        """End all fetches and threads, without waiting for a file that is being read."""
        self._file_threads.shutdown(wait=False, cancel_futures=True)
        with self._fetcher_lock:
            self._is_closed = True
            if self._fetcher is not None:
                self._fetcher.close()
        self._cache.clear()

    def _start(
        self, remote: Sequence[Address], cancelled: Future[None] | None
    ) -> dict[tuple[Address, ...], Future[list[LoadedMedia]]]:
        """Start to load the URLs that have to be waited for, and return a future for each group.

        All http(s) URLs form one group, and each file is one of its own. All futures are cancelled
        when `cancelled` completes. Raise `StoppingError` if the loader was closed.
        """
        files = [address for address in remote if _get_scheme(address[0]) == "file"]
        urls = tuple(address for address in remote if _get_scheme(address[0]) != "file")
        started: dict[tuple[Address, ...], Future[list[LoadedMedia]]] = {}
        try:
            if urls:
                started[urls] = self._get_fetcher().start(urls)
            for file in files:
                started[(file,)] = self._file_threads.submit(self._load_here, *file)
        except RuntimeError as error:  # executors and the loop raise this after they were closed
            raise StoppingError(_CLOSED) from error
        if cancelled is not None:
            for future in started.values():
                cancelled.add_done_callback(_make_cancel(future))
        return started

    def _load_here(self, source: MediaSource, modality: str) -> list[LoadedMedia]:
        began = time.monotonic()
        outcome: MediaBytes | RequestError
        try:
            outcome = MediaBytes(self._read(source, modality))
        except RequestError as error:
            outcome = error
        return [LoadedMedia(outcome=outcome, fetch_s=time.monotonic() - began)]

    def _account(self, source: MediaSource, loaded: LoadedMedia) -> LoadedMedia:
        """Count a loaded or refused item, and return its result; an empty item becomes an error."""
        outcome = loaded.outcome
        if isinstance(outcome, MediaBytes) and not outcome.data:
            outcome = RefusedMediaError("the media is empty: it has no bytes", "empty")
            loaded = LoadedMedia(outcome=outcome, fetch_s=loaded.fetch_s)
        if isinstance(outcome, MediaBytes):
            kind: SourceKind = "bytes"
            if isinstance(source, str | os.PathLike):
                kind = _KINDS[_get_scheme(source)] if isinstance(source, str) else "file"
            self._counters.add_loaded(kind, len(outcome.data))
        else:
            reason = outcome.reason if isinstance(outcome, RefusedMediaError) else "malformed"
            self._counters.add_refusal(reason)
        return loaded

    def _read(self, source: MediaSource, modality: str) -> bytes:
        limits = self._limits
        if modality not in MODALITIES:
            raise RequestError(f"the modality must be image, video or audio, not {modality!r}")
        if isinstance(source, str):
            if _get_scheme(source) == "data":
                return decode_data_url(source, limits.max_bytes)
            if _get_scheme(source) == "file":
                return read_local_file(source, limits.allowed_local_path, limits.max_bytes)
            raise RequestError(
                "media URLs start with data:, http:, https: or file: (instead of a path, give the "
                "file's bytes, or a file: URL below allowed_local_media_path)"
            )
        if isinstance(source, os.PathLike):
            return _read_own_file(source, limits.max_bytes)
        if not isinstance(source, bytes | bytearray | memoryview):
            raise RequestError(f"media must be bytes or a URL, not {type(source).__name__}")
        refuse_above(limits.max_bytes, memoryview(source).nbytes)
        return source if isinstance(source, bytes) else bytes(source)

    def _get_fetcher(self) -> Fetcher:
        """Return the fetcher, which the first call creates; raise `RuntimeError` after `close`."""
        with self._fetcher_lock:
            if self._is_closed:
                raise RuntimeError(_CLOSED)
            if self._fetcher is None:
                self._fetcher = self._make_fetcher()
            return self._fetcher


# Scheme of a URL -> the kind under which it is counted.
_KINDS: dict[str, SourceKind] = {"data": "data", "file": "file", "http": "http", "https": "http"}


def _get_scheme(source: str) -> str:
    return source[:8].partition(":")[0].lower()


def _is_remote(source: MediaSource) -> TypeGuard[str]:
    """Return True if the source is a URL of a host or a file, so that loading may have to wait."""
    return isinstance(source, str) and _KINDS.get(_get_scheme(source)) in ("file", "http")


def _make_cancel(future: Future[list[LoadedMedia]]) -> Callable[[object], None]:
    """Return a callback that cancels the future, without keeping its result in memory."""
    reference = weakref.ref(future)

    def cancel(_: object) -> None:
        if (found := reference()) is not None:
            found.cancel()

    return cancel


_MAX_HEADER_CHARACTERS = 1024
# Percent-decoding takes many times the memory of its input, and is meant for short texts.
_MAX_PERCENT_ENCODED = 4 * 2**20
# Spellings in base64 -> the characters of strict base64. They are replaced one after the other,
# because several passes of `bytes.replace` are faster than one `translate`.
_ESCAPES = {b"%2b": b"+", b"%2f": b"/", b"%3d": b"=", b"%20": b"", b"%0a": b"", b"%0d": b""}
_SPELLINGS = {b"\n": b"", b"\r": b"", b" ": b"", b"\t": b"", b"\f": b"", b"-": b"+", b"_": b"/"}


def decode_data_url(source: str, max_bytes: int) -> bytes:
    """Return the decoded content of a URL `data:[type][;parameters][;base64],payload`.

    Any media type is accepted. Raise `RequestError` if the URL is malformed, or if its content has
    more than `max_bytes`.
    """
    comma = source.find(",", 5, 5 + _MAX_HEADER_CHARACTERS)
    if comma < 0:
        raise RequestError("the data URL has no comma between its media type and its content")
    parameters = [word.strip().lower() for word in source[5:comma].split(";")[1:]]
    num_characters = len(source) - comma - 1
    if "base64" in parameters:
        refuse_above(max_bytes, num_characters * 3 // 4 - 2)
        media = _decode_base64(source[comma + 1 :])
    else:
        refuse_above(max_bytes, num_characters // 3)
        if num_characters > _MAX_PERCENT_ENCODED:
            raise RefusedMediaError(
                f"a data URL of over {_MAX_PERCENT_ENCODED} characters must be base64", "size"
            )
        try:
            media = unquote_to_bytes(source[comma + 1 :])
        except UnicodeEncodeError:
            raise RequestError(
                "the content of the data URL has characters that can't be encoded as UTF-8"
            ) from None
    refuse_above(max_bytes, len(media))
    return media


def _decode_base64(payload: str) -> bytes:
    try:
        return pybase64.b64decode(payload, validate=True)
    except ValueError:  # also `binascii.Error`
        pass
    try:
        return pybase64.b64decode(_normalise(payload), validate=True)
    except ValueError:
        raise RequestError("the content of the data URL is not valid base64") from None


def _normalise(payload: str) -> bytes:
    encoded = payload.encode("ascii")
    if b"%" in encoded:
        for escape, character in _ESCAPES.items():
            encoded = encoded.replace(escape, character).replace(escape.upper(), character)
    for spelling, character in _SPELLINGS.items():
        encoded = encoded.replace(spelling, character)
    encoded = encoded.rstrip(b"=")
    return encoded + b"=" * (-len(encoded) % 4)


_MAX_CHARACTERS = 16 * 1024  # a path of PATH_MAX bytes, percent-encoded
_MAX_SHOWN = 200  # of the characters of a path, which may be a whole file in base64 by mistake
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


_UNREADABLE = (
    "the local file can't be read: it is missing, not a file, or not in the allowed directory"
)


def read_local_file(source: str, allowed_path: Path | None, max_bytes: int) -> bytes:
    """Return the content of a file below `allowed_path`; `None` allows no file.

    Raise `RequestError` if the file can't or may not be read, or has more than `max_bytes`.
    """
    if allowed_path is None:
        raise RefusedMediaError(
            "this server reads no local files, because allowed_local_media_path is not set",
            "local_file",
        )
    path = _parse_path(source)
    try:
        descriptor = _open_below(allowed_path, path)
        try:
            return _read_regular(descriptor, max_bytes)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        raise RefusedMediaError(_UNREADABLE, "local_file") from None


def _parse_path(source: str) -> str:
    try:
        if len(source) > _MAX_CHARACTERS:
            raise ValueError
        url = urlsplit(source)
        path = os.fsdecode(unquote_to_bytes(url.path))
        host = url.netloc.lower()
    except ValueError:
        raise RequestError(
            "the file URL is malformed: it must look like file:///directory/name"
        ) from None
    if host not in ("", "localhost") or not path.startswith("/"):
        raise RequestError("a file URL must look like file:///directory/name, without a host")
    return path


def _open_below(allowed_path: Path, path: str) -> int:
    root = Path(os.path.realpath(allowed_path))
    *directories, name = Path(os.path.realpath(path)).relative_to(root).parts or (".",)
    parent = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for directory in directories:
            child = os.open(directory, _OPEN_FLAGS | os.O_DIRECTORY, dir_fd=parent)
            os.close(parent)
            parent = child
        return os.open(name, _OPEN_FLAGS, dir_fd=parent)
    finally:
        os.close(parent)


def _read_own_file(path: os.PathLike[str], max_bytes: int) -> bytes:
    """Return the content of a file that a caller in this process names by a path object."""
    name = os.fspath(path)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _read_regular(descriptor, max_bytes)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or "it is no regular file"
        shown = f"{name!r}" if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]!r}..."
        raise RequestError(f"the file {shown} can't be read: {reason}") from None


def _read_regular(descriptor: int, max_bytes: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError
    refuse_above(max_bytes, status.st_size)
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        return file.read(status.st_size)
