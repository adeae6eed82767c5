"""Gets media over http(s): follows redirects, keeps responses, and trusts no host.

It is used on one event loop. The caller cancels a fetch when its time is over, so that waits need
no timeouts of their own. Nothing of the environment, no cookie, no credential and no proxy has a
part in a request. httpcore bounds the head of an answer (100 KiB), and the reader its body.

Invariants:
  1. Every hop of a redirect passes the same checks as the first: spelling, domain, address.
  2. All checks and connections use the `httpx.URL` of `parse_media_url`, so that no two parsers can
     differ.
  3. Only checked addresses are connected to: httpcore asks `PinnedBackend` for each connection. TLS
     keeps the name of the URL, because only the dialled address is replaced.
  4. A fetch holds no more than `max_bytes` of an answer.
  5. An answer is only reused for the URL that gave it, while its host's headers allow it. Redirects
     are always asked again.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpcore
import httpx

from sensorium.multimodal.fetching.addresses import (
    AddressGuard,
    AllowedDomains,
    Resolve,
    canonical_host,
)
from sensorium.multimodal.fetching.fetch import Fetch, FetchCounters
from sensorium.multimodal.fetching.responses import (
    CachedResponse,
    ResponseCache,
    SharedFetches,
    check_before_body,
    check_content_type,
    read_body,
)
from sensorium.multimodal.media import MediaBytes, MediaLimits
from sensorium.types.errors import RequestError


def parse_media_url(source: str | httpx.URL) -> httpx.URL:
    """Return an http(s) URL without a fragment and with a canonical host.

    Raise `RequestError` for anything else.
    """
    try:
        url = httpx.URL(source)
        host = canonical_host(url.raw_host.decode("ascii"))
        if url.scheme not in ("http", "https") or url.userinfo or not _is_port(url.port):
            raise ValueError
        return url.copy_with(host=host, fragment=None)
    except (httpx.InvalidURL, ValueError):  # ValueError: also of idna and of encodings
        raise RequestError(
            "the media URL is malformed: http(s)://host[:port]/path, without a user, is expected"
        ) from None


def _is_port(port: int | None) -> bool:
    return port is None or 0 < port < 2**16


Connect = Callable[[str, int, float], Awaitable[httpcore.AsyncNetworkStream]]
_MAX_ADDRESSES = 8
_MAX_HEAD_BYTES = 256 * 1024
_CONNECT_ERRORS = (OSError, httpcore.ConnectError, httpcore.ConnectTimeout)


async def connect_socket(address: str, port: int, timeout_s: float) -> httpcore.AsyncNetworkStream:
    """Connect to an address, which is dialled as it is: no name is looked up."""
    return await httpcore.AnyIOBackend().connect_tcp(address, port, timeout=timeout_s)


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """The network of one exchange, which makes one connection at most."""

    def __init__(self, *, guard: AddressGuard, connect: Connect, fetch: Fetch) -> None:
        self._guard = guard
        self._connect = connect
        self._fetch = fetch
        self._stream: httpcore.AsyncNetworkStream | None = None

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002
        local_address: str | None = None,  # noqa: ARG002
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002
    ) -> httpcore.AsyncNetworkStream:
        addresses = (await self._guard.look_up(host, port, self._fetch))[:_MAX_ADDRESSES]
        for num_left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            # A dead address may not use up the time of those behind it.
            timeout_s = self._fetch.remaining_s() / num_left
            try:
                self._stream = await self._connect(address, port, timeout_s)
            except _CONNECT_ERRORS:
                continue
            return PinnedStream(self._stream, self._fetch)
        if not self._fetch.remaining_s():
            raise self._fetch.expired()
        raise self._fetch.refusal("no connection could be made", "connection")

    async def close(self) -> None:
        """Close the connection, also one that httpcore has no hold of yet or no longer."""
        if self._stream is not None:
            await self._stream.aclose()


class PinnedStream(httpcore.AsyncNetworkStream):
    """A stream that gives a bounded number of bytes until `expect_body` is called.

    httpcore bounds the head of an answer, but not how many interim answers may come before it.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream, fetch: Fetch) -> None:
        self._stream = stream
        self._fetch = fetch
        self._num_head_bytes_left: float = _MAX_HEAD_BYTES

    def expect_body(self) -> None:
        self._num_head_bytes_left = math.inf

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        if self._num_head_bytes_left <= 0:
            raise httpcore.RemoteProtocolError
        # Also yields to other fetches when the bytes are there already.
        received = await self._stream.read(max_bytes)
        self._num_head_bytes_left -= len(received)
        return received

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        await self._stream.write(buffer)

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002
    ) -> httpcore.AsyncNetworkStream:
        try:
            encrypted = await self._stream.start_tls(ssl_context, server_hostname)
        except (httpcore.ConnectError, OSError, ValueError) as error:
            # ValueError: a name that TLS can't carry.
            if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                raise self._fetch.refusal("its certificate can't be verified", "tls") from None
            raise self._fetch.refusal("no TLS connection could be made", "tls") from None
        return PinnedStream(encrypted, self._fetch)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


_DEFAULT_PORTS = {"http": 80, "https": 443}
# The same for every request and modality, which is what makes a cached answer good for all.
_HEADERS = {
    "User-Agent": "sensorium",
    "Accept": "*/*",
    "Accept-Encoding": "identity",
    "Connection": "close",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer with its body still to come."""

    status: int
    headers: Mapping[str, str]  # by lower-case name, repeated ones joined by commas
    chunks: AsyncIterable[bytes]


@asynccontextmanager
async def open_exchange(
    url: httpx.URL,
    validators: Mapping[str, str],
    *,
    backend: PinnedBackend,
    ssl_context: ssl.SSLContext | None,
    fetch: Fetch,
) -> AsyncIterator[Answer]:
    """Send one request over a connection of its own, and give its answer.

    Raise a refusal for what goes wrong on the wire, also while the body is read inside the block.
    """
    host, port = url.raw_host, url.port or _DEFAULT_PORTS[url.scheme]
    origin = httpcore.Origin(scheme=url.raw_scheme, host=host, port=port)
    target = httpcore.URL(scheme=url.raw_scheme, host=host, port=port, target=url.raw_path)
    headers = {"Host": url.netloc.decode("ascii"), **_HEADERS, **validators}
    sent = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
    try:
        async with (
            httpcore.AsyncHTTPConnection(
                origin, ssl_context=ssl_context, network_backend=backend
            ) as connection,
            connection.stream("GET", target, headers=sent) as response,
        ):
            response.extensions["network_stream"].expect_body()
            yield Answer(
                status=response.status,
                headers=_join_headers(response.headers),
                chunks=response.aiter_stream(),
            )
    except (httpcore.NetworkError, httpcore.TimeoutException):
        raise fetch.refusal("the connection broke", "connection") from None
    except httpcore.ProtocolError:
        raise fetch.refusal("the answer is not complete, valid HTTP", "protocol") from None
    finally:
        await backend.close()


def _join_headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in pairs:
        name, value = raw_name.decode("ascii").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class HttpClient:
    """A client for media over http(s).

    Without an `ssl_context` it trusts certificates of the system and of certifi.
    """

    def __init__(
        self,
        limits: MediaLimits,
        *,
        domains: AllowedDomains,
        resolve: Resolve,
        connect: Connect,
        cache: ResponseCache,
        counters: FetchCounters,
        clock: Callable[[], float],
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits
        self._connect = connect
        self._cache = cache
        self._counters = counters
        self._clock = clock
        self._given_ssl_context = ssl_context
        self._domains = domains
        self._guard = AddressGuard(resolve, allow_private=limits.allow_private_addresses)
        self.shared = SharedFetches()

    async def fetch(self, url: httpx.URL, modality: str, fetch: Fetch) -> MediaBytes:
        """Return the media at `url`. Requests that ask for it at the same time share one fetch."""
        return await self.shared.get(
            (str(url), modality), lambda: self._follow(url, modality, fetch)
        )

    @cached_property
    def _ssl_context(self) -> ssl.SSLContext:
        return self._given_ssl_context or httpcore.default_ssl_context()

    async def _follow(self, url: httpx.URL, modality: str, fetch: Fetch) -> MediaBytes:
        for _ in range(self._limits.max_redirects + 1):
            if not self._domains.has(url.raw_host.decode("ascii")):
                raise fetch.refusal("leads to a domain that may not be asked", "domain")
            found = await self._ask(url, modality, fetch)
            if isinstance(found, MediaBytes):
                return found
            url = found
        raise fetch.refusal(f"more than {self._limits.max_redirects} redirects", "redirects")

    async def _ask(self, url: httpx.URL, modality: str, fetch: Fetch) -> MediaBytes | httpx.URL:
        """Return the content of `url`, or the URL to ask instead."""
        cached = self._cache.get(str(url))
        if cached is not None and cached.fresh_until > self._clock():
            check_content_type(cached.headers, modality, fetch)
            self._counters.add("response_cache_hit")
            return cached.media
        backend = PinnedBackend(guard=self._guard, connect=self._connect, fetch=fetch)
        async with open_exchange(
            url,
            cached.validators if cached is not None else {},
            backend=backend,
            ssl_context=self._ssl_context if url.scheme == "https" else None,
            fetch=fetch,
        ) as answer:
            self._counters.add("fetch")
            if answer.status in _REDIRECTS:
                return _redirect(url, answer, fetch)
            if answer.status == 304 and cached is not None:
                return self._confirm(url, cached, answer, modality, fetch)
            return await self._receive(url, answer, modality, fetch)

    def _confirm(
        self, url: httpx.URL, cached: CachedResponse, answer: Answer, modality: str, fetch: Fetch
    ) -> MediaBytes:
        now = self._clock()
        confirmed = cached.confirm(answer.headers, now)
        check_content_type(confirmed.headers, modality, fetch)
        self._counters.add("revalidation")
        self._cache.replace(str(url), confirmed, now)
        return cached.media

    async def _receive(
        self, url: httpx.URL, answer: Answer, modality: str, fetch: Fetch
    ) -> MediaBytes:
        if answer.status != 200:
            raise fetch.refusal(f"the host answered with status {answer.status}", "status")
        check_content_type(answer.headers, modality, fetch)
        check_before_body(answer.headers, self._limits.max_bytes, fetch)
        now = self._clock()
        media = MediaBytes(await read_body(answer.chunks, self._limits.max_bytes, fetch))
        self._counters.add_bytes(len(media.data))
        self._cache.replace(str(url), CachedResponse.receive(media, answer.headers, now), now)
        return media


def _redirect(url: httpx.URL, answer: Answer, fetch: Fetch) -> httpx.URL:
    try:
        return parse_media_url(url.join(answer.headers["location"]))
    except (KeyError, httpx.InvalidURL, ValueError, RequestError):
        raise fetch.refusal("a redirect leads to no http(s) address", "scheme") from None
