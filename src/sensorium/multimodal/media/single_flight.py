"""One fetch for all who ask for the same at the same time.

Their requests are alike to the last header, so the host would have answered each of them the same
way at that moment. Nothing is kept once a fetch has ended: that is the response cache's part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future

from sensorium.multimodal.media.fetch import Fetch
from sensorium.multimodal.media.media_bytes import MediaBytes
from sensorium.multimodal.media.refusal import RefusedMediaError


class SingleFlight:
    """Thread-safe. Followers wait in their own threads, no longer than their own fetch has left."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, Future[MediaBytes]] = {}
        self._lock = threading.Lock()

    def run(self, key: Hashable, call: Callable[[], MediaBytes], fetch: Fetch) -> MediaBytes:
        """The result or the error of `call`, made by this or by another thread."""
        while True:
            with self._lock:
                flight = self._flights.get(key)
                if flight is None:
                    mine = self._flights[key] = Future()
            if flight is None:
                return self._lead(key, call, mine)
            media = self._follow(flight, fetch)
            if media is not None:
                return media

    def _lead(
        self, key: Hashable, call: Callable[[], MediaBytes], flight: Future[MediaBytes]
    ) -> MediaBytes:
        try:
            media = call()
        except BaseException as error:
            self._land(key)
            flight.set_exception(error)
            raise
        self._land(key)
        flight.set_result(media)
        return media

    def _land(self, key: Hashable) -> None:
        with self._lock:
            del self._flights[key]

    @staticmethod
    def _follow(flight: Future[MediaBytes], fetch: Fetch) -> MediaBytes | None:
        """None: the leader ran out of its time or was interrupted, which is nothing to us."""
        try:
            error = flight.exception(timeout=fetch.remaining_s())
        except TimeoutError:
            raise fetch.expired() from None
        if error is None:
            return flight.result()
        if isinstance(error, RefusedMediaError) and error.reason != "deadline":
            raise RefusedMediaError(str(error), error.reason)
        if isinstance(error, RefusedMediaError) or not isinstance(error, Exception):
            return None
        raise error
