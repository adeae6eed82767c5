"""An event loop in a thread of its own, on which all fetches wait for their hosts.

A fetch that waits costs a socket and a coroutine, but no thread: however many hosts are slow, the
threads that render, decode and tokenise are free for others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

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
