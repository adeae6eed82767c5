"""Runs work for clients without blocking the event loop, and cancels it if the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.types import Receive

from sensorium.server.http.errors import ClientGoneError

_LAG_INTERVAL_S = 0.05  # between two measurements of the loop's lag
# Few threads, because each may hold the interpreter's lock, and the event loop waits for them.
_threads = ThreadPoolExecutor(2, "encode")
_Result = TypeVar("_Result")


async def run_in_thread(
    work: Callable[[], _Result], threads: ThreadPoolExecutor = _threads
) -> _Result:
    """Return the result of `work`, which runs in a thread so that it does not delay the event loop.

    If this coroutine is cancelled, it still waits for the end of the work, which may use memory or
    files that the caller would release.
    """
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait((future,))
        raise


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of `work`, or cancel it and raise `ClientGoneError` if the client leaves.

    The request's body must have been received: `receive` is read until the client leaves.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def measure_loop_lag(observe: Callable[[float], None]) -> None:
    """Pass the event loop's lag in seconds to `observe` 20 times a second, until cancelled."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(_LAG_INTERVAL_S)
        observe(max(0.0, time.monotonic() - before - _LAG_INTERVAL_S))
