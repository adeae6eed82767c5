"""Waiting for facts: one place, patient, with a limit against hangs only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 240.0  # on a machine that others use too
_SHORTEST_S, _LONGEST_S = 0.002, 0.05  # between two looks, which become rarer


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
    """Do the same without holding up the event loop."""
    for pause_s in _get_pauses(what, timeout_s):
        if condition():
            return
        await asyncio.sleep(pause_s)


def _get_pauses(what: str, timeout_s: float) -> Iterator[float]:
    """Yield how long to wait before the next look. Fail when the time is over."""
    deadline = time.monotonic() + timeout_s
    pause_s = _SHORTEST_S
    while time.monotonic() < deadline:
        yield pause_s
        pause_s = min(1.5 * pause_s, _LONGEST_S)
    raise AssertionError(f"waited {timeout_s} s in vain until {what}")
