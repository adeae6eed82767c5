"""Gets media over http(s): follows redirects, keeps responses, and trusts no host.

Owns the order of checks. Used on one event loop; the caller cancels a fetch whose time is over.
Invariants:
  1. Every hop of a redirect passes the same checks as the first: spelling, domain, address.
  2. A fetch holds no more than `max_bytes` of an answer.
  3. An answer is only reused for the URL that gave it, while its host's headers allow it;
     redirects are always asked again.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from functools import cached_property

import httpcore
import httpx

from sensorium.multimodal.fetching.address_guard import AddressGuard, Resolve
from sensorium.multimodal.fetching.fetch import Fetch
from sensorium.multimodal.fetching.fetch_statistics import FetchCounters
from sensorium.multimodal.fetching.hosts import AllowedDomains
from sensorium.multimodal.fetching.http_exchange import Answer, open_exchange
from sensorium.multimodal.fetching.media_url import parse_media_url
from sensorium.multimodal.fetching.pinned_connection import Connect, PinnedBackend
from sensorium.multimodal.fetching.response_cache import CachedResponse, ResponseCache
from sensorium.multimodal.fetching.response_checks import (
    check_before_body,
    check_content_type,
    read_body,
)
from sensorium.multimodal.fetching.shared_fetches import SharedFetches
from sensorium.multimodal.limits import MediaLimits
from sensorium.multimodal.media_bytes import MediaBytes
from sensorium.types.errors import RequestError

_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class HttpClient:
    """`ssl_context` None: certificates of the system and of certifi."""

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
        """The content of `url`, or where to ask for it instead."""
        cached = self._cache.touch(str(url))
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
