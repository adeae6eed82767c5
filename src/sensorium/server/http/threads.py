"""Work that takes too long for the event loop: megabytes that are encoded or tokenised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# Few: each may keep the interpreter to itself, and the event loop waits for all of them in turn.
_threads = ThreadPoolExecutor(2, "encode")
_Result = TypeVar("_Result")


async def run_in_thread(work: Callable[[], _Result]) -> _Result:
    """Cancelled, it ends when the work has: what that reads is not given back under its hands."""
    future = asyncio.get_running_loop().run_in_executor(_threads, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait((future,))
        raise
