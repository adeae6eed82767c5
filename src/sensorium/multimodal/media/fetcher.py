"""Fetches the http(s) media of requests: which fetch runs when, and until when.

Owns the event loop of all fetches and the shares of requests in it. Thread-safe.

Invariants:
  1. The fetches of one request end within its deadline, each item within its own.
  2. A cancelled request has no fetch under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from sensorium.multimodal.media.fetch import Fetch, RequestDeadline, refuse_late_request
from sensorium.multimodal.media.fetch_loop import FetchLoop
from sensorium.multimodal.media.fetch_shares import FetchShares, RequestShare
from sensorium.multimodal.media.http_client import HttpClient
from sensorium.multimodal.media.limits import MediaLimits
from sensorium.multimodal.media.media_bytes import LoadedMedia, MediaBytes
from sensorium.multimodal.media.media_url import parse_media_url
from sensorium.types.errors import RequestError

Address = tuple[str, str]  # a URL and a modality
T = TypeVar("T")


class Fetcher:
    """A thread with an event loop, on which `client` fetches for all requests."""

    def __init__(
        self, limits: MediaLimits, client: HttpClient, *, shares: FetchShares | None = None
    ) -> None:
        self.client = client
        self._limits = limits
        self._shares = shares or FetchShares()
        self._loop = FetchLoop()

    def start(self, addresses: Sequence[Address]) -> list[Future[LoadedMedia]]:
        """Start to fetch all media of one request; return a future for each address.

        Cancelling a future ends its fetch. Raise `RuntimeError` if the fetcher was closed.
        """
        deadline = RequestDeadline(self._limits.get_request_deadline_s())
        share = self._shares.join()
        return [
            self._loop.submit(self._try_to_fetch(address, share, deadline)) for address in addresses
        ]

    def close(self) -> None:
        """End all fetches and the thread; futures that are not done are cancelled."""
        self._loop.close()

    async def _try_to_fetch(
        self, address: Address, share: RequestShare, deadline: RequestDeadline
    ) -> LoadedMedia:
        began = time.monotonic()
        outcome: MediaBytes | RequestError
        try:
            source, modality = address
            url = parse_media_url(source)
            host = url.raw_host.decode("ascii")
            try:
                async with asyncio.timeout(deadline.remaining_s()), share:
                    began = time.monotonic()
                    fetch = Fetch(host, self._limits.deadline_s, request=deadline)
                    outcome = await _limit(self.client.fetch(url, modality, fetch), fetch)
            except TimeoutError:
                raise refuse_late_request(host, deadline) from None
        except RequestError as error:
            outcome = error
        return LoadedMedia(outcome=outcome, fetch_s=time.monotonic() - began)


async def _limit(work: Coroutine[Any, Any, T], fetch: Fetch) -> T:
    """Cancel the work when the time of its fetch is over, and refuse the item."""
    try:
        async with asyncio.timeout(fetch.remaining_s()):
            return await work
    except TimeoutError:
        raise fetch.expired() from None
