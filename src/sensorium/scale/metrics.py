"""The metrics of a cluster: the sums of what all its frontends and engines have counted.

Each process keeps its metrics as on one machine. A frontend that is asked for `/metrics` asks all
other processes for their values, and adds them up. Shares are averages over the processes that have
them. The contents of a cache that processes share are those of the process that reports most. A
process that has ended takes its counts with it, as does a server that is restarted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sensorium.server.metrics.frontend import FrontendMetrics

_SHARE = "_perc"  # the end of the names of gauges that are shares of a whole, and no counts
_CONTENTS = tuple(f"sensorium:cache_{what}" for what in ("items", "bytes", "capacity_bytes"))
_SHARED = ("disk", "remote")  # levels of caching that processes share
_INFO = "_info"  # the end of the names of series that have their content in labels, with value 1
_CREATED = "_created"  # the end of the names of times, which no server of one machine writes
_SPILLS = "sensorium:scale_spills_total"
_PLACED = "sensorium:scale_requests_total"
_RETRIES = "sensorium:scale_retries_total"


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One value of a metric, with the name of its series."""

    name: str
    labels: dict[str, str]
    value: float


class Series(msgspec.Struct, frozen=True, array_like=True):
    """A metric with all of its values in one process."""

    name: str
    text: str
    kind: str
    samples: tuple[Sample, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Series, ...])


def encode_samples(source: Collector) -> bytes:
    return _encoder.encode(
        tuple(
            Series(
                metric.name,
                metric.documentation,
                metric.type,
                tuple(
                    Sample(s.name, dict(s.labels), s.value)
                    for s in metric.samples
                    if not s.name.endswith(_CREATED)
                ),
            )
            for metric in source.collect()
        )
    )


class Sums(Collector):
    """A collector that adds up the metrics of several processes."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = [_decoder.decode(part) for part in parts]

    def collect(self) -> Iterable[Metric]:
        heads: dict[str, Series] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], list[float]]] = {}
        for series in (series for part in self._parts for series in part):
            heads.setdefault(series.name, series)
            own = values.setdefault(series.name, {})
            for sample in series.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                own.setdefault(key, []).append(sample.value)
        for name, head in heads.items():
            metric = Metric(name, head.text, head.kind)
            for (sample_name, labels), given in values[name].items():
                united = _unite(name, dict(labels), given)
                metric.add_sample(sample_name, dict(labels), united)
            yield metric


def _unite(name: str, labels: Mapping[str, str], given: Sequence[float]) -> float:
    """Return the value of a series for all processes together.

    Every process has all series, and a share that does not concern a process is always 0 there, so
    zeros do not lower an average. Values that processes share are not added up.
    """
    if name.endswith(_INFO) or (name in _CONTENTS and labels.get("level") in _SHARED):
        return max(given)
    if not name.endswith(_SHARE):
        return sum(given)
    used = [value for value in given if value]
    return sum(used) / len(used) if used else 0.0


class ClusterMetrics(FrontendMetrics):
    """The metrics of one frontend, with those that `encode_samples` made in all other processes."""

    def __init__(
        self, model_name: str, read_others: Callable[[], Awaitable[Sequence[bytes]]]
    ) -> None:
        super().__init__(model_name)
        self._read_others = read_others

    async def read_others(self) -> Sequence[bytes]:
        return await self._read_others()

    def encode_own(self) -> bytes:
        return encode_samples(self._metrics.registry)

    def follow_placements(self, *, placed: int, spilled: int) -> None:
        self._totals.follow(_PLACED, placed)
        self._totals.follow(_SPILLS, spilled)

    def count_retry(self, reason: str) -> None:
        """Count a call of an engine that was repeated: "lost", "missing" or "moved"."""
        self._metrics.counter(_RETRIES, reason).inc()

    def _get_source(self, pattern: str, others: Sequence[bytes]) -> Collector:  # noqa: ARG002
        return Sums([self.encode_own(), *others])
