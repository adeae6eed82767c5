"""Waits until a condition holds, with a limit so long that it is reached only by a hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 240.0  # long, because the machine may be busy
_SHORTEST_S, _LONGEST_S = 0.002, 0.05  # pauses between two checks; they become longer


def wait_until(
    condition: Callable[[], bool], what: str = "it happened", timeout_s: float = PATIENCE_S
) -> None:
    """Return when the condition holds. Fail if it does not within `timeout_s`."""
    for pause_s in _get_pauses(what, timeout_s):
        if condition():
            return
        time.sleep(pause_s)


async def wait_until_async(
    condition: Callable[[], bool], what: str = "it happened", timeout_s: float = PATIENCE_S
) -> None:
    """Wait like `wait_until`, without blocking the event loop."""
    for pause_s in _get_pauses(what, timeout_s):
        if condition():
            return
        await asyncio.sleep(pause_s)


def _get_pauses(what: str, timeout_s: float) -> Iterator[float]:
    """Yield how long to wait before the next check. Fail when the time is over."""
    deadline = time.monotonic() + timeout_s
    pause_s = _SHORTEST_S
    while time.monotonic() < deadline:
        yield pause_s
        pause_s = min(1.5 * pause_s, _LONGEST_S)
    raise AssertionError(f"waited {timeout_s} s in vain until {what}")
