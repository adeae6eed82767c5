"""Fetches the http(s) media of requests on an event loop in a thread of its own.

A fetch that waits costs a socket and a coroutine, but no thread. However many hosts are slow, the
threads that render, decode and tokenise are free for others.

Invariants:
  1. The fetches of one request end within its deadline, and each item within its own.
  2. A cancelled request has no fetch under way.
  3. A request never waits, nor is refused, for what other requests fetch, unless it holds more
     bytes than any of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from sensorium.multimodal.fetching.fetch import (
    Fetch,
    FetchMemory,
    FetchShares,
    RequestBytes,
    RequestDeadline,
    RequestShare,
    refuse_late_request,
)
from sensorium.multimodal.fetching.http_client import HttpClient, parse_media_url
from sensorium.multimodal.media import LoadedMedia, MediaBytes, MediaLimits
from sensorium.types.errors import CapacityError, RequestError

T = TypeVar("T")


class FetchLoop:
    """A running event loop that takes coroutines from any thread."""

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
        """Start the coroutine on the loop. Cancelling the future cancels it there.

        Raise `RuntimeError` if the loop was closed.
        """
        with self._lock:  # what is submitted before `close` is cancelled by it, never forgotten
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError("the loop for fetches was closed")

    def close(self) -> None:
        """Cancel everything that runs on the loop, and wait until the thread has ended."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            if is_first and self._stop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        self._stop = asyncio.Event()
        started.set_result(asyncio.get_running_loop())
        await self._stop.wait()  # then `asyncio.run` cancels what is left, and waits for its end


Address = tuple[str, str]  # a URL and a modality
# So many items of the largest size may be in memory while they, or others of their requests, are
# still being fetched.
_NUM_LARGEST_ITEMS = 32


class Fetcher:
    """A thread with an event loop, on which `client` fetches for all requests."""

    def __init__(
        self,
        limits: MediaLimits,
        client: HttpClient,
        *,
        shares: FetchShares | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.client = client
        self._limits = limits
        self._shares = shares or FetchShares()
        self._memory = FetchMemory(max_bytes or _NUM_LARGEST_ITEMS * limits.max_bytes)
        self._loop = FetchLoop()

    def start(self, addresses: Sequence[Address]) -> Future[list[LoadedMedia]]:
        """Start to fetch all media of one request; the results are in the order of `addresses`.

        Cancelling the future ends the fetches. Raise `RuntimeError` if the fetcher was closed.
        """
        return self._loop.submit(self._fetch_all(addresses))

    def close(self) -> None:
        """End all fetches and the thread; futures that are not done are cancelled."""
        self._loop.close()

    async def _fetch_all(self, addresses: Sequence[Address]) -> list[LoadedMedia]:
        deadline = RequestDeadline(self._limits.get_request_deadline_s())
        share = self._shares.join()
        own = asyncio.current_task()
        held = self._memory.join(lambda: own is not None and own.cancel())
        tasks = [
            asyncio.ensure_future(self._try_to_fetch(address, share, deadline, held))
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
            for task in tasks:  # an error of ours in one of them ends the others
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            held.release()

    async def _try_to_fetch(
        self,
        address: Address,
        share: RequestShare,
        deadline: RequestDeadline,
        held: RequestBytes,
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
                    fetch = Fetch(host, self._limits.deadline_s, request=deadline, held=held)
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
