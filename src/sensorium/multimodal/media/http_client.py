"""Gets media over http(s): follows redirects, keeps responses, and trusts no host.

Owns the order of checks. Invariants:
  1. Every hop of a redirect passes the same checks as the first: spelling, domain, address.
  2. A fetch ends within its deadline and holds no more than `max_bytes` of an answer.
  3. An answer is only reused for the URL that gave it, while its host's headers allow it;
     redirects are always asked again.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property

import httpcore
import httpx

from sensorium.multimodal.media.address_guard import AddressGuard, Resolve
from sensorium.multimodal.media.fetch import Fetch
from sensorium.multimodal.media.fetch_statistics import FetchCounters
from sensorium.multimodal.media.hosts import AllowedDomains
from sensorium.multimodal.media.http_exchange import Answer, open_exchange
from sensorium.multimodal.media.limits import MediaLimits
from sensorium.multimodal.media.media_bytes import MediaBytes
from sensorium.multimodal.media.media_url import parse_media_url
from sensorium.multimodal.media.pinned_connection import Connect, PinnedBackend
from sensorium.multimodal.media.refusal import RefusedMediaError
from sensorium.multimodal.media.response_cache import CachedResponse, ResponseCache
from sensorium.multimodal.media.response_checks import (
    check_before_body,
    check_content_type,
    read_body,
)
from sensorium.multimodal.single_flight import FinishedFlight, SingleFlight
from sensorium.types.errors import RequestError

_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class HttpClient:
    """Thread-safe. `ssl_context` None: certificates of the system and of certifi."""

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
        num_threads: int,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits
        self._connect = connect
        self._cache = cache
        self._counters = counters
        self._clock = clock
        self._given_ssl_context = ssl_context
        self._domains = domains
        self._is_stopping = threading.Event()
        self._flights: SingleFlight[tuple[str, str], MediaBytes] = SingleFlight()
        self._guard = AddressGuard(
            resolve, allow_private=limits.allow_private_addresses, num_threads=num_threads
        )

    def fetch(
        self, source: str, modality: str, *, cancelled: Future[None] | None = None
    ) -> MediaBytes:
        """Raises `CancelledError` soon after `cancelled` completes."""
        url = parse_media_url(source)
        host = url.raw_host.decode("ascii")
        fetch = Fetch(host, self._limits.deadline_s, self._is_stopping, cancelled=cancelled)

        def start() -> FinishedFlight:
            return FinishedFlight(self._follow(url, modality, fetch))

        while True:
            remaining_s = fetch.remaining_s()  # refuses here: in a flight it would seem another's
            waiter = self._flights.join((str(url), modality), start)
            try:
                return waiter.result(timeout_s=remaining_s, cancelled=cancelled)
            except TimeoutError:
                raise fetch.expired() from None
            except RefusedMediaError as error:
                if error.reason != "deadline":  # which was another's: ours may be later
                    raise
            finally:
                waiter.leave()

    def close(self) -> None:
        """Fetches that wait for a host are given up."""
        self._is_stopping.set()
        self._guard.close()

    @cached_property
    def _ssl_context(self) -> ssl.SSLContext:
        return self._given_ssl_context or httpcore.default_ssl_context()

    def _follow(self, url: httpx.URL, modality: str, fetch: Fetch) -> MediaBytes:
        for _ in range(self._limits.max_redirects + 1):
            if not self._domains.has(url.raw_host.decode("ascii")):
                raise fetch.refusal("leads to a domain that may not be asked", "domain")
            found = self._ask(url, modality, fetch)
            if isinstance(found, MediaBytes):
                return found
            url = found
        raise fetch.refusal(f"more than {self._limits.max_redirects} redirects", "redirects")

    def _ask(self, url: httpx.URL, modality: str, fetch: Fetch) -> MediaBytes | httpx.URL:
        """The content of `url`, or where to ask for it instead."""
        cached = self._cache.touch(str(url))
        if cached is not None and cached.fresh_until > self._clock():
            check_content_type(cached.headers, modality, fetch)
            self._counters.add("response_cache_hit")
            return cached.media
        backend = PinnedBackend(guard=self._guard, connect=self._connect, fetch=fetch)
        with open_exchange(
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
            return self._receive(url, answer, modality, fetch)

    def _confirm(
        self, url: httpx.URL, cached: CachedResponse, answer: Answer, modality: str, fetch: Fetch
    ) -> MediaBytes:
        now = self._clock()
        confirmed = cached.confirm(answer.headers, now)
        check_content_type(confirmed.headers, modality, fetch)
        self._counters.add("revalidation")
        self._cache.replace(str(url), confirmed, now)
        return cached.media

    def _receive(self, url: httpx.URL, answer: Answer, modality: str, fetch: Fetch) -> MediaBytes:
        if answer.status != 200:
            raise fetch.refusal(f"the host answered with status {answer.status}", "status")
        check_content_type(answer.headers, modality, fetch)
        check_before_body(answer.headers, self._limits.max_bytes, fetch)
        now = self._clock()
        media = MediaBytes(read_body(answer.chunks, self._limits.max_bytes, fetch))
        self._counters.add_bytes(len(media.data))
        self._cache.replace(str(url), CachedResponse.receive(media, answer.headers, now), now)
        return media


def _redirect(url: httpx.URL, answer: Answer, fetch: Fetch) -> httpx.URL:
    try:
        return parse_media_url(url.join(answer.headers["location"]))
    except (KeyError, httpx.InvalidURL, ValueError, RequestError):
        raise fetch.refusal("a redirect leads to no http(s) address", "scheme") from None
