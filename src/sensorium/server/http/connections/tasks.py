"""Runs work in threads or until the client leaves, and measures the delay of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.types import Receive

from sensorium.server.http.errors import ClientGoneError

# Few threads, because each may hold the interpreter's lock, and the event loop waits for them.
_threads = ThreadPoolExecutor(2, "encode")
_Result = TypeVar("_Result")
_INTERVAL_S = 0.05  # between two measurements of the loop's lag


async def run_in_thread(work: Callable[[], _Result]) -> _Result:
    """Run work in a thread that is too long for the event loop, such as encoding megabytes.

    A cancelled call ends only after the work, which may still read memory that the caller would
    release.
    """
    future = asyncio.get_running_loop().run_in_executor(_threads, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait((future,))
        raise


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of `work`, or cancel it when the client leaves and raise `ClientGoneError`.

    The body must have been read.
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
    """Report the delay of the event loop, which delays the tokens of streams, until cancelled."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(_INTERVAL_S)
        observe(max(0.0, time.monotonic() - before - _INTERVAL_S))
