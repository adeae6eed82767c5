"""Reads what all processes of a server have written.

Counters of dead processes stay; their gauges are 0 once the parent has seen their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from sensorium.server.metrics.definitions import ALIASES
from sensorium.server.metrics.memory import get_path


class Source(Protocol):
    """Anything that gives metrics: a registry, or a directory's files."""

    def collect(self) -> Iterable[Metric]: ...


class Files:
    """`pattern`: which files of the directory are read."""

    def __init__(self, directory: Path, pattern: str = "*.db") -> None:
        self._directory = directory
        self._pattern = pattern

    def collect(self) -> Iterable[Metric]:
        # A file is empty for a moment when it has just been made.
        paths = [str(path) for path in self._directory.glob(self._pattern) if _get_size(path)]
        merged: Iterable[Metric] = MultiProcessCollector.merge(paths)  # type: ignore[no-untyped-call]
        return merged


def _get_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # the server is ending
        return 0


class Values:
    """All samples at one moment."""

    def __init__(self, source: Source) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for metric in source.collect():
            for sample in metric.samples:
                rows = self._samples.setdefault(sample.name, [])
                rows.append((sample.labels, sample.value))

    def get(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels; 0 if there is none."""
        rows = self._samples.get(name, ())
        return sum(value for own, value in rows if labels.items() <= own.items())

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._samples)


def render(source: Source) -> tuple[bytes, str]:
    """The body and the content type of `GET /metrics`."""
    registry = CollectorRegistry()
    registry.register(_WithAliases(source))
    return generate_latest(registry), CONTENT_TYPE_LATEST


def clear_gauges(writer: str, directory: Path) -> None:
    """Set the gauges of a process that has ended to 0. Its files keep their layout: a reader may
    be in the middle of them, and the next process of this name goes on with them.
    """
    path = get_path(directory, "gauge_livesum", writer)
    if not _get_size(path):
        return
    gauges = MmapedDict(str(path))  # type: ignore[no-untyped-call]
    try:
        for key, _, _ in list(gauges.read_all_values()):  # type: ignore[no-untyped-call]
            gauges.write_value(key, 0.0, 0.0)  # type: ignore[no-untyped-call]
    finally:
        gauges.close()  # type: ignore[no-untyped-call]


class _WithAliases:
    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        names = {name: alias for alias, name in ALIASES.items()}
        for metric in self._source.collect():
            yield metric
            if metric.name in names:
                yield _rename(metric, names[metric.name])


def _rename(metric: Metric, name: str) -> Metric:
    renamed = Metric(name, metric.documentation, metric.type)
    renamed.samples = [
        sample._replace(name=name + sample.name.removeprefix(metric.name))
        for sample in metric.samples
    ]
    return renamed
