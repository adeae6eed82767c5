"""Work that is given up as soon as its client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from sensorium.server.http.errors import ClientGoneError

_Result = TypeVar("_Result")


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The body must have been read. Raises `ClientGoneError` after `work` was cancelled and has
    ended.
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
