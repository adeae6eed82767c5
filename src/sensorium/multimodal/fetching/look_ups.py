"""Looks names up without holding up anything else.

The system's resolver blocks, may take half a minute for one name, and can't be interrupted, only
left behind. So each look-up has a thread of its own, which ends with it: a name that is slow holds
up no other one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from sensorium.types.errors import CapacityError

# More than the fetches that can be under way by default. Only look-ups that were left behind, by
# clients that came and went, can fill the rest.
_MAX_LOOK_UPS = 1024


class LookUps:
    """The look-ups that run at this moment, those that were left behind included."""

    def __init__(
        self, resolve: Callable[[str, int], Sequence[str]], max_threads: int = _MAX_LOOK_UPS
    ) -> None:
        self._resolve = resolve
        self._room = asyncio.Semaphore(max_threads)

    async def find(self, host: str, port: int) -> Sequence[str]:
        """Return what the resolver says, or raise what it raises."""
        loop = asyncio.get_running_loop()
        found: Future[Sequence[str]] = Future()
        found.set_running_or_notify_cancel()  # from here on it can't be cancelled, only ignored

        def run() -> None:
            try:
                found.set_result(self._resolve(host, port))
            except BaseException as error:  # raised where the answer is awaited
                found.set_exception(error)
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._room.release)

        await self._room.acquire()
        try:
            # A daemon: a resolver that hangs must not keep the process from ending.
            threading.Thread(target=run, name="media-dns", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads
            self._room.release()
            raise CapacityError("no thread could be started to look up a media host") from error
        return await asyncio.wrap_future(found)
