"""Copies totals that other code counts into Prometheus counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sensorium.server.metrics.metric_set import MetricSet

if TYPE_CHECKING:
    from sensorium.multimodal.cache.interface import CacheStatistics
    from sensorium.multimodal.tiers.tiers import MediaTiers


class Totals:
    """A set of Prometheus counters, each increased by the growth of a total."""

    def __init__(self, metrics: MetricSet) -> None:
        self._metrics = metrics
        self._seen: dict[tuple[str, ...], int] = {}  # name and labels -> total at the last call

    def follow(self, name: str, total: int, *label_values: str, is_foreign: bool = False) -> None:
        """Increase a counter by the growth of `total` since the last call.

        The first call adds the whole total. With `is_foreign` the first call adds nothing, because
        earlier processes have counted that part and have written it to their metrics.
        """
        key = (name, *label_values)
        seen = self._seen.get(key, total if is_foreign else 0)
        self._seen[key] = total
        if total > seen:
            self._metrics.counter(name, *label_values).inc(total - seen)

    def follow_level(self, level: str, statistics: CacheStatistics) -> None:
        """Write the queries, hits, evictions and contents of one of `_CACHE_LEVELS`."""
        self.follow_look_ups(level, statistics)
        self.follow("sensorium:cache_evictions_total", statistics.num_evictions, level)
        self.set_contents(level, statistics)

    def follow_look_ups(self, level: str, statistics: CacheStatistics) -> None:
        self.follow("sensorium:cache_queries_total", statistics.num_queries, level)
        self.follow("sensorium:cache_hits_total", statistics.num_hits, level)

    def follow_tiers(self, tiers: MediaTiers, *, with_contents: bool) -> None:
        """Write the counts of this process's tiers; only one process writes the shared contents."""
        for level, statistics in tiers.statistics().items():
            self.follow_look_ups(level, statistics)
            self.follow("sensorium:cache_evictions_total", statistics.num_evictions, level)
            self.follow("sensorium:tier_writes_total", statistics.num_writes, level)
            for fault, count in (
                ("damaged", statistics.num_damaged),
                ("failed", statistics.num_errors),
                ("dropped", tiers.writer.num_dropped),
                ("skipped", tiers.num_skipped),
            ):
                self.follow("sensorium:tier_faults_total", count, level, fault)
            if with_contents:
                self.set_contents(level, statistics)

    def set_contents(self, level: str, statistics: CacheStatistics) -> None:
        """Write the items, the bytes and the capacity in bytes of one level of caching."""
        gauge = self._metrics.gauge
        gauge("sensorium:cache_items", level).set(statistics.num_items)
        gauge("sensorium:cache_bytes", level).set(statistics.num_bytes)
        gauge("sensorium:cache_capacity_bytes", level).set(statistics.capacity_bytes)
