"""How long the stages of one item took, in seconds of the monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sensorium.types.times import ItemTimes


class StageTimes:
    """Not safe to use from several threads: what others measured is added when it is here."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.add({stage: time.monotonic() - began})

    def add(self, times: ItemTimes) -> None:
        """A stage that was there already takes that much longer."""
        self._seconds = add_times(self._seconds, times)

    def get(self) -> ItemTimes:
        return dict(self._seconds)


def add_times(first: ItemTimes, second: ItemTimes) -> dict[str, float]:
    stages = {**first, **second}
    return {stage: first.get(stage, 0.0) + second.get(stage, 0.0) for stage in stages}
