"""The metrics of the table, as one process writes them.

With a directory (`PROMETHEUS_MULTIPROC_DIR`, or `use_directory`) the values lie in files there
(`memory`), which all processes of a server write and any of them reads. Then there may be one set
per process. Without a directory a process has its own values only, which is enough for a test.

All gauges are sums over the processes that live. Each process has all series of the table, so none
is ever missing; a series that a process doesn't write stays 0 there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values

from sensorium.server.metrics.definitions import DEFINITIONS, Definition, get_common_labels
from sensorium.types.errors import InvariantError

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_Metric = Counter | Gauge | Histogram


def use_directory(directory: Path, *, writer: str) -> None:
    """Make this process write its metrics from now on in a directory, in the files of `writer`.

    Only one process at a time may write under a name.
    """
    os.environ[_VARIABLE] = str(directory)
    write_as(writer)


def write_as(writer: str) -> None:
    """Use the files of `writer` in the directory that this process was started with, if any."""
    if get_directory() is not None:
        values.ValueClass = values.MultiProcessValue(lambda: writer)  # type: ignore[no-untyped-call]


def get_directory() -> Path | None:
    """Return the directory in which metrics lie, if there is one."""
    directory = os.environ.get(_VARIABLE)
    return None if directory is None else Path(directory)


class MetricSet:
    """All series of the table. Each is made once, and then found by its name and label values."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._definitions = {definition.name: definition for definition in DEFINITIONS}
        self._metrics = {name: self._make(each) for name, each in self._definitions.items()}
        self._series: dict[tuple[str, ...], _Metric] = {}
        for definition in DEFINITIONS:
            for label_values in definition.values:
                self._get(definition.name, label_values)

    def counter(self, name: str, *label_values: str) -> Counter:
        """Return a counter of the table."""
        series = self._get(name, label_values)
        if not isinstance(series, Counter):
            raise InvariantError(f"{name} is no counter")
        return series

    def gauge(self, name: str, *label_values: str) -> Gauge:
        """Return a gauge of the table."""
        series = self._get(name, label_values)
        if not isinstance(series, Gauge):
            raise InvariantError(f"{name} is no gauge")
        return series

    def histogram(self, name: str, *label_values: str) -> Histogram:
        """Return a histogram of the table."""
        series = self._get(name, label_values)
        if not isinstance(series, Histogram):
            raise InvariantError(f"{name} is no histogram")
        return series

    def _get(self, name: str, label_values: tuple[str, ...]) -> _Metric:
        key = (name, *label_values)
        series = self._series.get(key)
        if series is None:
            labels = get_common_labels(name, self._model_name)
            own = zip(self._definitions[name].labels, label_values, strict=True)
            labels |= dict(own)
            metric = self._metrics[name]
            series = self._series[key] = metric.labels(**labels) if labels else metric
        return series

    def _make(self, definition: Definition) -> _Metric:
        name, text, registry = definition.name, definition.text, self.registry
        labels = (*get_common_labels(name, self._model_name), *definition.labels)
        if definition.kind == "counter":
            return Counter(name, text, labels, registry=registry)
        if definition.kind == "gauge":
            return Gauge(name, text, labels, registry=registry, multiprocess_mode="livesum")
        return Histogram(name, text, labels, registry=registry, buckets=definition.buckets)


if TYPE_CHECKING:
    from sensorium.multimodal.cache.interface import CacheStatistics


class Totals:
    """Counters that follow the totals that other parts count from their start.

    The increase since the last call is added to the counter.
    """

    def __init__(self, metrics: MetricSet) -> None:
        self._metrics = metrics
        self._seen: dict[tuple[str, ...], int] = {}  # name and labels -> total at the last call

    def follow(self, name: str, total: int, *label_values: str, is_foreign: bool = False) -> None:
        """Bring a counter up to `total`.

        With `is_foreign`, earlier processes have counted a part of the total. Then only the
        increase after the first call is added.
        """
        key = (name, *label_values)
        seen = self._seen.get(key, total if is_foreign else 0)
        self._seen[key] = total
        if total > seen:
            self._metrics.counter(name, *label_values).inc(total - seen)

    def follow_level(self, level: str, statistics: CacheStatistics) -> None:
        """Write all statistics of a level of caching."""
        self.follow_look_ups(level, statistics)
        self.follow("sensorium:cache_evictions_total", statistics.num_evictions, level)
        self.set_contents(level, statistics)

    def follow_look_ups(self, level: str, statistics: CacheStatistics) -> None:
        """Write the queries and hits of a level of caching."""
        self.follow("sensorium:cache_queries_total", statistics.num_queries, level)
        self.follow("sensorium:cache_hits_total", statistics.num_hits, level)

    def set_contents(self, level: str, statistics: CacheStatistics) -> None:
        """Write what a level of caching holds."""
        for word, value in (
            ("items", statistics.num_items),
            ("bytes", statistics.num_bytes),
            ("capacity_bytes", statistics.capacity_bytes),
        ):
            self._metrics.gauge(f"sensorium:cache_{word}", level).set(value)
