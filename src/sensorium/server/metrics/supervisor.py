"""What the parent of all processes counts: how often it had to start one again, and how often the
core made no progress.
"""

from __future__ import annotations

from typing import Literal

from sensorium.server.metrics.metric_set import MetricSet


class SupervisorMetrics:
    """To be made after `use_directory`: the environment of the parent does not name it."""

    def __init__(self, model_name: str) -> None:
        self._metrics = MetricSet(model_name)

    def count_restart(self, kind: Literal["core", "frontend"]) -> None:
        self._metrics.counter("sensorium:process_restarts_total", kind).inc()

    def count_stall(self) -> None:
        self._metrics.counter("sensorium:core_stalls_total").inc()
