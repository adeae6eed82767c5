"""Counters that follow numbers which others keep.

A cache, a pool or a scheduler counts since its start; what came since the last look is added here.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter


class Total:
    """One such number, and the counters that follow it. `is_foreign`: it was counted before this
    process, which adds only what comes after the first look.
    """

    def __init__(self, counters: Sequence[Counter], *, is_foreign: bool = False) -> None:
        self._counters = counters
        self._seen: float | None = None if is_foreign else 0

    def follow(self, total: float) -> None:
        seen, self._seen = self._seen, total
        if seen is not None and total > seen:
            for counter in self._counters:
                counter.inc(total - seen)
