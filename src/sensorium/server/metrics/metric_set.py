"""The metrics of the table, as this process writes them.

With a directory (`PROMETHEUS_MULTIPROC_DIR`, or `use_directory`) values lie in files there
(`memory`), which all processes of a server write and any of them reads: then there may be one set
per process.
Without one a process knows its own values only, which is good enough for a test.

All gauges are sums over the processes that live. Each process has all series of the table, so none
is ever missing; what a process doesn't count stays 0 there.
"""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values

from sensorium.server.metrics.definitions import DEFINITIONS, Definition, get_common_labels
from sensorium.types.errors import InvariantError

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_Metric = Counter | Gauge | Histogram


def use_directory(directory: Path, *, writer: str) -> None:
    """Let the metrics that this process makes from now on lie there, in the files of `writer`. One
    process at a time may write under a name.
    """
    os.environ[_VARIABLE] = str(directory)
    write_as(writer)


def write_as(writer: str) -> None:
    """Use the files of `writer` in the directory that this process was started with, if any."""
    if get_directory() is not None:
        values.ValueClass = values.MultiProcessValue(lambda: writer)  # type: ignore[no-untyped-call]


def get_directory() -> Path | None:
    directory = os.environ.get(_VARIABLE)
    return None if directory is None else Path(directory)


class MetricSet:
    """Every series is made once and then found by its name and label values."""

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
        series = self._get(name, label_values)
        if not isinstance(series, Counter):
            raise InvariantError(f"{name} is no counter")
        return series

    def gauge(self, name: str, *label_values: str) -> Gauge:
        series = self._get(name, label_values)
        if not isinstance(series, Gauge):
            raise InvariantError(f"{name} is no gauge")
        return series

    def histogram(self, name: str, *label_values: str) -> Histogram:
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
