"""Fetches the media of requests over http(s), on an event loop in a thread of its own.

A fetch that waits needs a socket and a coroutine, but no thread. However many hosts are slow, the
threads that render, decode and tokenise are free for other requests.

The client follows redirects, caches responses, and trusts no host. A fetch is cancelled when its
time is over, so that its single operations need no timeouts. Requests contain nothing from the
environment: no cookie, no credential, no proxy. httpcore bounds the head of a response (100 KiB),
and `read_body` its body.

Invariants:
  1. Every hop of a redirect passes the same checks as the first: spelling, domain, address.
  2. All checks and connections use the `httpx.URL` of `parse_media_url`, so that no two parsers can
     differ.
  3. Only checked addresses are connected to: httpcore asks `PinnedBackend` for each connection. TLS
     keeps the name of the URL, because only the dialled address is replaced.
  4. A fetch holds no more than `max_bytes` of a response.
  5. A cached response is used only for its own URL, while its host's headers allow it. Redirects
     are never cached.
  6. The fetches of one request end within its deadline, and each item within its own.
  7. A cancelled request has no fetch under way.
  8. A request never waits, nor is refused, because of what other requests fetch, unless it holds
     more bytes than any of them.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import httpcore
import httpx

from sensorium.multimodal.fetching.fetch import (
    Address,
    Deadline,
    Fetch,
    FetchCounters,
    FetchMemory,
    FetchShares,
    RefusedMediaError,
    RequestBytes,
    RequestShare,
    SharedFetches,
)
from sensorium.multimodal.fetching.hosts import (
    AddressGuard,
    AllowedDomains,
    CachedResponse,
    Headers,
    Resolve,
    ResponseCache,
    canonical_host,
    check_before_body,
    check_content_type,
    read_body,
)
from sensorium.multimodal.media import LoadedMedia, MediaBytes, MediaLimits
from sensorium.types.errors import CapacityError, RequestError

T = TypeVar("T")
Connect = Callable[[str, int, float], Awaitable[httpcore.AsyncNetworkStream]]
_DEFAULT_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_ADDRESSES = 8
_MAX_HEAD_BYTES = 256 * 1024
_CONNECT_ERRORS = (OSError, httpcore.ConnectError, httpcore.ConnectTimeout)
# They are the same for every request and modality, so that a cached response serves all of them.
_HEADERS = {
    "User-Agent": "sensorium",
    "Accept": "*/*",
    "Accept-Encoding": "identity",
    "Connection": "close",
}
# While requests fetch, they may hold as many bytes in memory as this number of the largest items.
_NUM_LARGEST_ITEMS = 32


def parse_media_url(source: str | httpx.URL) -> httpx.URL:
    """Return an http(s) URL with its host in canonical form, and without its fragment.

    Raise `RequestError` if `source` is no valid http(s) URL, or contains a user name.
    """
    try:
        url = httpx.URL(source)
        host = canonical_host(url.raw_host.decode("ascii"))
        is_port = url.port is None or 0 < url.port < 2**16
        if url.scheme not in _DEFAULT_PORTS or url.userinfo or not is_port:
            raise ValueError
        return url.copy_with(host=host, fragment=None)
    except (httpx.InvalidURL, ValueError):  # ValueError: also of idna and of encodings
        raise RequestError(
            "the media URL is malformed: it must be http(s)://host[:port]/path, without a user name"
        ) from None


async def connect_socket(address: str, port: int, timeout_s: float) -> httpcore.AsyncNetworkStream:
    """Open a TCP connection to an IP address that was checked already, within `timeout_s`."""
    return await httpcore.AnyIOBackend().connect_tcp(address, port, timeout=timeout_s)


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """A backend of httpcore for one exchange, which connects only to addresses `guard` allows."""

    def __init__(self, guard: AddressGuard, connect: Connect, deadline: Deadline) -> None:
        self._guard = guard
        self._connect = connect
        self._deadline = deadline
        self._stream: httpcore.AsyncNetworkStream | None = None

    async def connect_tcp(
        self, host: str, port: int, *_: object, **__: object
    ) -> httpcore.AsyncNetworkStream:
        addresses = (await self._guard.look_up(host, port))[:_MAX_ADDRESSES]
        for index, address in enumerate(addresses):
            # An address that does not answer must not use up the time of the next ones.
            timeout_s = self._deadline.remaining_s() / (len(addresses) - index)
            try:
                self._stream = await self._connect(address, port, timeout_s)
            except _CONNECT_ERRORS:
                continue
            return PinnedStream(self._stream)
        if not self._deadline.remaining_s():
            raise TimeoutError
        raise RefusedMediaError("no connection to the host could be made", "connection")

    async def close(self) -> None:
        """Close the connection, even if httpcore does not have it yet or has dropped it."""
        if self._stream is not None:
            await self._stream.aclose()


class PinnedStream(httpcore.AsyncNetworkStream):
    """A connection that reads a bounded number of bytes until `expect_body` is called.

    httpcore limits the head of a response, but not the number of interim responses before it.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._num_head_bytes_left: float = _MAX_HEAD_BYTES

    def expect_body(self) -> None:
        self._num_head_bytes_left = math.inf

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        if self._num_head_bytes_left <= 0:
            raise httpcore.RemoteProtocolError
        # Other fetches may run here, even if the bytes have been received already.
        received = await self._stream.read(max_bytes)
        self._num_head_bytes_left -= len(received)
        return received

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        await self._stream.write(buffer)

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        *_: object,
        **__: object,
    ) -> httpcore.AsyncNetworkStream:
        try:
            encrypted = await self._stream.start_tls(ssl_context, server_hostname)
        except (httpcore.ConnectError, OSError, ValueError) as error:
            # ValueError: a name that TLS can't carry.
            if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                raise RefusedMediaError(
                    "the host's TLS certificate has expired, or can't be verified", "tls"
                ) from None
            raise RefusedMediaError("the TLS handshake with the host failed", "tls") from None
        return PinnedStream(encrypted)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


@dataclass(kw_only=True, eq=False)
class HttpClient:
    """An HTTP client that fetches media, with a response cache, redirects and checks of hosts."""

    limits: MediaLimits
    domains: AllowedDomains
    resolve: Resolve
    connect: Connect
    cache: ResponseCache
    counters: FetchCounters
    clock: Callable[[], float]
    given_ssl_context: ssl.SSLContext | None  # None: trust the system's and certifi's certificates
    shared: SharedFetches = field(default_factory=SharedFetches)

    def __post_init__(self) -> None:
        self._guard = AddressGuard(self.resolve, allow_private=self.limits.allow_private_addresses)

    async def fetch(self, url: httpx.URL, modality: str, fetch: Fetch) -> MediaBytes:
        """Return the media at `url`, from the cache or from its host, within the limits in `fetch`.

        Concurrent requests for the same URL and modality share one fetch. Raise `RefusedMediaError`
        if the media can't or may not be fetched.
        """
        return await self.shared.get(
            (str(url), modality), lambda: self._follow(url, modality, fetch)
        )

    @cached_property
    def _ssl_context(self) -> ssl.SSLContext:
        return self.given_ssl_context or httpcore.default_ssl_context()

    async def _follow(self, url: httpx.URL, modality: str, fetch: Fetch) -> MediaBytes:
        for _ in range(self.limits.max_redirects + 1):
            if not self.domains.has(url.raw_host.decode("ascii")):
                raise RefusedMediaError(
                    "the URL leads to a domain that is not in allowed_media_domains", "domain"
                )
            found = await self._ask(url, modality, fetch)
            if isinstance(found, MediaBytes):
                return found
            url = found
        raise RefusedMediaError(
            f"the URL leads to more than {self.limits.max_redirects} redirects, which is the limit",
            "redirects",
        )

    async def _ask(self, url: httpx.URL, modality: str, fetch: Fetch) -> MediaBytes | httpx.URL:
        """Return the media at `url`, or the URL that the host redirects to.

        A cached response is returned if it is still fresh, or if the host confirms it.
        """
        cached = self.cache.get(str(url))
        if cached is not None and cached.fresh_until > self.clock():
            check_content_type(cached.headers, modality)
            self.counters.add("response_cache_hit")
            return cached.media
        validators = {} if cached is None else cached.validators
        async with self._open_exchange(url, validators, fetch.deadline) as response:
            self.counters.add("fetch")
            headers = httpx.Headers(response.headers, encoding="latin-1")
            now = self.clock()
            if response.status in _REDIRECTS:
                return _redirect(url, headers)
            if response.status == 304 and cached is not None:
                received = cached.confirm(headers, now)
                check_content_type(received.headers, modality)
                self.counters.add("revalidation")
            else:
                media = await self._receive(response, headers, modality, fetch.held)
                received = CachedResponse.receive(media, headers, now)
            self.cache.replace(str(url), received, now)
            return received.media

    @asynccontextmanager
    async def _open_exchange(
        self, url: httpx.URL, validators: Mapping[str, str], deadline: Deadline
    ) -> AsyncIterator[httpcore.Response]:
        """Send one GET request over a new connection, and give its response to the `with` block.

        `validators` are request headers that ask whether a cached response is still valid. Raise
        `RefusedMediaError` if the connection or the protocol fails, also while the block reads the
        body.
        """
        host, port = url.raw_host, url.port or _DEFAULT_PORTS[url.scheme]
        backend = PinnedBackend(self._guard, self.connect, deadline)
        connection = httpcore.AsyncHTTPConnection(
            httpcore.Origin(scheme=url.raw_scheme, host=host, port=port),
            ssl_context=self._ssl_context if url.scheme == "https" else None,
            network_backend=backend,
        )
        target = httpcore.URL(scheme=url.raw_scheme, host=host, port=port, target=url.raw_path)
        headers = {"Host": url.netloc.decode("ascii"), **_HEADERS, **validators}
        sent = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
        try:
            async with connection, connection.stream("GET", target, headers=sent) as response:
                response.extensions["network_stream"].expect_body()
                yield response
        except (httpcore.NetworkError, httpcore.TimeoutException):
            raise RefusedMediaError("the connection to the host broke", "connection") from None
        except httpcore.ProtocolError:
            raise RefusedMediaError(
                "the host's response is not complete, valid HTTP", "protocol"
            ) from None
        finally:
            await backend.close()

    async def _receive(
        self, response: httpcore.Response, headers: Headers, modality: str, held: RequestBytes
    ) -> MediaBytes:
        if response.status != 200:
            raise RefusedMediaError(f"the host answered with status {response.status}", "status")
        check_content_type(headers, modality)
        check_before_body(headers, self.limits.max_bytes)
        body = await read_body(response.aiter_stream(), self.limits.max_bytes, held)
        self.counters.add("received_byte", len(body))
        return MediaBytes(body)


def _redirect(url: httpx.URL, headers: Headers) -> httpx.URL:
    try:
        return parse_media_url(url.join(headers["location"]))
    except (KeyError, httpx.InvalidURL, ValueError, RequestError):
        raise RefusedMediaError(
            "a redirect of the host leads to no http(s) URL", "scheme"
        ) from None


class FetchLoop:
    """An event loop in a thread of its own, to which any thread may submit coroutines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._stop: asyncio.Event | None = None
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="media-fetch", daemon=True
        )
        self._thread.start()
        self._loop = started.result()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop, and return a future through which it can be cancelled."""
        with self._lock:  # so that `close` cancels everything that was submitted before it
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError("the event loop for media fetches was closed")

    def close(self) -> None:
        """Cancel everything that runs on the loop, and wait until its thread has ended."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            if is_first and self._stop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        self._stop = asyncio.Event()
        started.set_result(asyncio.get_running_loop())
        await self._stop.wait()  # then `asyncio.run` cancels all other tasks, and waits for them


class Fetcher:
    """The owner of the event loop on which `client` fetches the media of all requests."""

    def __init__(self, client: HttpClient, shares: FetchShares) -> None:
        self.client = client
        self._limits = client.limits
        self._shares = shares
        self._memory = FetchMemory(_NUM_LARGEST_ITEMS * self._limits.max_bytes)
        self._loop = FetchLoop()

    def start(self, addresses: Sequence[Address]) -> Future[list[LoadedMedia]]:
        """Start to fetch all media of one request, and return a future of the results.

        There is one result for each of `addresses`, in their order: media, or the error. Cancelling
        the future cancels the fetches. Raise `RuntimeError` if the fetcher was closed.
        """
        return self._loop.submit(self._fetch_all(addresses))

    def close(self) -> None:
        self._loop.close()

    async def _fetch_all(self, addresses: Sequence[Address]) -> list[LoadedMedia]:
        deadline = Deadline(
            self._limits.get_request_deadline_s(),
            scope=", the limit for all media of one request together",
        )
        share = RequestShare(self._shares)
        own = asyncio.current_task()
        held = self._memory.join(lambda: own is not None and own.cancel())
        tasks = [
            asyncio.ensure_future(self._try_to_fetch(address, share, Fetch(deadline, held)))
            for address in addresses
        ]
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if held.is_refused:
                raise CapacityError(
                    "Too much media is being fetched at once, most of it for this request "
                    f"(limit {self._memory.max_bytes} bytes). Retry later."
                ) from None
            raise
        finally:
            for task in tasks:  # a bug in one of them ends the others
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._memory.leave(held)

    async def _try_to_fetch(
        self, address: Address, share: RequestShare, fetch: Fetch
    ) -> LoadedMedia:
        """Fetch one item when `share` lets it begin, and return its bytes, or the error."""
        source, modality = address
        began = time.monotonic()
        outcome: MediaBytes | RequestError
        try:
            url = parse_media_url(source)
            try:
                async with asyncio.timeout(fetch.deadline.remaining_s()) as timer, share:
                    began = time.monotonic()
                    fetch = self._begin(fetch, timer)
                    outcome = await self.client.fetch(url, modality, fetch)
            except TimeoutError:
                raise fetch.deadline.expired() from None
        except RefusedMediaError as error:
            # The text names the host that the client sent, never one that a redirect led to.
            host = url.raw_host.decode("ascii")
            outcome = RefusedMediaError(f"media from {host}: {error.message}", error.reason)
        except RequestError as error:
            outcome = error
        return LoadedMedia(outcome=outcome, fetch_s=time.monotonic() - began)

    def _begin(self, fetch: Fetch, timer: asyncio.Timeout) -> Fetch:
        """Return the limits of a fetch that begins now, with the earlier one of two deadlines.

        They are the item's and the request's. `timer` has the request's, and is set to the item's
        if that is earlier.
        """
        own = Deadline(self._limits.deadline_s)
        if own.remaining_s() >= fetch.deadline.remaining_s():
            return fetch
        timer.reschedule(asyncio.get_running_loop().time() + own.remaining_s())
        return Fetch(own, fetch.held)
