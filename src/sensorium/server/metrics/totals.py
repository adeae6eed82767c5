"""Counters that follow numbers which others keep.

A cache, a pool or a scheduler counts since its start; what came since the last look is added here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sensorium.server.metrics.metric_set import MetricSet

if TYPE_CHECKING:
    from sensorium.multimodal.cache.interface import CacheStatistics


class Totals:
    """Owns what was seen of each number at the last look."""

    def __init__(self, metrics: MetricSet) -> None:
        self._metrics = metrics
        self._seen: dict[tuple[str, ...], int] = {}

    def follow(self, name: str, total: int, *label_values: str, is_foreign: bool = False) -> None:
        """Bring a counter up to `total`. `is_foreign`: others counted it before this process, which
        adds what comes after its first look.
        """
        key = (name, *label_values)
        seen = self._seen.get(key, total if is_foreign else 0)
        self._seen[key] = total
        if total > seen:
            self._metrics.counter(name, *label_values).inc(total - seen)

    def follow_level(self, level: str, statistics: CacheStatistics) -> None:
        """All that is known of a level of caching."""
        self.follow_look_ups(level, statistics)
        self.follow("sensorium:cache_evictions_total", statistics.num_evictions, level)
        self.set_contents(level, statistics)

    def follow_look_ups(self, level: str, statistics: CacheStatistics) -> None:
        self.follow("sensorium:cache_queries_total", statistics.num_queries, level)
        self.follow("sensorium:cache_hits_total", statistics.num_hits, level)

    def set_contents(self, level: str, statistics: CacheStatistics) -> None:
        for word, value in (
            ("items", statistics.num_items),
            ("bytes", statistics.num_bytes),
            ("capacity_bytes", statistics.capacity_bytes),
        ):
            self._metrics.gauge(f"sensorium:cache_{word}", level).set(value)
