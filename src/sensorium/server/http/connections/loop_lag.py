"""Measures how late the event loop is: what a stream's tokens wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_INTERVAL_S = 0.05


async def measure_loop_lag(observe: Callable[[float], None]) -> None:
    """Until it is cancelled."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(_INTERVAL_S)
        observe(max(0.0, time.monotonic() - before - _INTERVAL_S))
