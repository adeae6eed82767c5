"""One fetch per URL at a time: a request that comes while it runs waits for its result.

Used on one event loop only. The fetch belongs to the request that began it, and ends with it; then
one of those that waited begins another. So no request is bound to the deadline of another.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable

from sensorium.multimodal.media_bytes import MediaBytes
from sensorium.types.errors import RequestError

Key = tuple[str, str]  # a URL and a modality


class SharedFetches:
    """The fetches that run at this moment, by URL and modality."""

    def __init__(self) -> None:
        self.num_waiting = 0  # callers of `get`, those that fetch included
        self._running: dict[Key, asyncio.Future[MediaBytes]] = {}

    async def get(self, key: Key, start: Callable[[], Awaitable[MediaBytes]]) -> MediaBytes:
        """Return what the running fetch of `key` brings, or what `start` does if there is none."""
        self.num_waiting += 1
        try:
            while (running := self._running.get(key)) is not None:
                await asyncio.wait([running])
                if not running.cancelled():  # else its owner has left, or was too late
                    return _take(running)
            return await self._lead(key, start)
        finally:
            self.num_waiting -= 1

    async def _lead(self, key: Key, start: Callable[[], Awaitable[MediaBytes]]) -> MediaBytes:
        running = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            media = await start()
        except Exception as error:
            # A copy: the error itself holds this frame, and so the future that would hold it.
            copied = copy.copy(error) if isinstance(error, RequestError) else error
            running.set_exception(copied)
            running.exception()  # looked at, should no other request wait for it
            raise
        except BaseException:
            running.cancel()
            raise
        finally:
            del self._running[key]
        running.set_result(media)
        return media


def _take(running: asyncio.Future[MediaBytes]) -> MediaBytes:
    error = running.exception()
    if isinstance(error, RequestError):
        raise copy.copy(error)  # a copy for each caller: a traceback grows with each raise
    return running.result()
