"""Reads the metrics that all processes of a server have written, and makes a log line of them.

Counters of dead processes stay. Their gauges are 0 as soon as the parent has seen their end.

The parent logs a line every few seconds while there is something to do. Its rates are those of the
time since the last line: tokens per second, and the shares of what was looked up in that time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from sensorium.server.metrics.definitions import ALIASES
from sensorium.server.metrics.memory import get_path

logger = logging.getLogger(__name__)
_PAUSE_S = 10.0  # between two log lines


class Source(Protocol):
    """Anything that gives metrics, such as a registry or the files of a directory."""

    def collect(self) -> Iterable[Metric]: ...


class Files:
    """The files of a directory that match a pattern."""

    def __init__(self, directory: Path, pattern: str = "*.db") -> None:
        self._directory = directory
        self._pattern = pattern

    def collect(self) -> Iterable[Metric]:
        # A file is empty for a moment after it was made.
        paths = [str(path) for path in self._directory.glob(self._pattern) if _get_size(path)]
        merged: Iterable[Metric] = MultiProcessCollector.merge(paths)  # type: ignore[no-untyped-call]
        return merged


def _get_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # the server is ending
        return 0


class Values:
    """The values of all series at one moment."""

    def __init__(self, source: Source) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for metric in source.collect():
            for sample in metric.samples:
                rows = self._samples.setdefault(sample.name, [])
                rows.append((sample.labels, sample.value))

    def get(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with this name and these labels, or 0 if there is none."""
        rows = self._samples.get(name, ())
        return sum(value for own, value in rows if labels.items() <= own.items())

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._samples)


def render(source: Source) -> tuple[bytes, str]:
    """Return the body and the content type of `GET /metrics`."""
    registry = CollectorRegistry()
    registry.register(_WithAliases(source))
    return generate_latest(registry), CONTENT_TYPE_LATEST


def clear_gauges(writer: str, directory: Path) -> None:
    """Set the gauges of a process that has ended to 0.

    Its files keep their layout, because a reader may be reading them, and the next process of this
    name continues them.
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
    """A source that also gives metrics with an alias under that alias."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The values that the log line needs.

    The first four are those of the moment, the others were counted since the start.
    """

    num_running: float = 0
    num_waiting: float = 0
    num_preparing: float = 0
    kv_cache_usage: float = 0
    num_prompt_tokens: float = 0
    num_generation_tokens: float = 0
    num_finished: float = 0
    num_prefix_queries: float = 0
    num_prefix_hits: float = 0
    num_mm_queries: float = 0
    num_mm_hits: float = 0


def _take_snapshot(values: Values) -> Snapshot:
    return Snapshot(
        num_running=values.get("vllm:num_requests_running"),
        num_waiting=values.get("vllm:num_requests_waiting"),
        num_preparing=values.get("sensorium:num_requests_preparing"),
        kv_cache_usage=values.get("vllm:kv_cache_usage_perc"),
        num_prompt_tokens=values.get("vllm:prompt_tokens_total"),
        num_generation_tokens=values.get("vllm:generation_tokens_total"),
        num_finished=values.get("vllm:request_success_total"),
        num_prefix_queries=values.get("vllm:prefix_cache_queries_total"),
        num_prefix_hits=values.get("vllm:prefix_cache_hits_total"),
        num_mm_queries=values.get("vllm:mm_cache_queries_total"),
        num_mm_hits=values.get("vllm:mm_cache_hits_total"),
    )


def format_line(last: Snapshot, now: Snapshot, *, seconds: float) -> str | None:
    """Return the line, or `None` if nothing is under way and nothing happened in between."""
    num_open = now.num_running + now.num_waiting + now.num_preparing
    if not num_open and _get_totals(last) == _get_totals(now):
        return None
    prompt_rate = (now.num_prompt_tokens - last.num_prompt_tokens) / seconds
    generation_rate = (now.num_generation_tokens - last.num_generation_tokens) / seconds
    prefix = _format_share(
        now.num_prefix_hits - last.num_prefix_hits, now.num_prefix_queries - last.num_prefix_queries
    )
    media = _format_share(
        now.num_mm_hits - last.num_mm_hits, now.num_mm_queries - last.num_mm_queries
    )
    return (
        f"Running: {now.num_running:.0f}, waiting: {now.num_waiting:.0f}, "
        f"preparing: {now.num_preparing:.0f} | prompt {prompt_rate:.1f} tok/s, "
        f"generation {generation_rate:.1f} tok/s | KV cache {now.kv_cache_usage:.1%} | "
        f"Prefix cache hit rate: {prefix} | MM cache hit rate: {media}"
    )


def _get_totals(snapshot: Snapshot) -> tuple[float, ...]:
    return (
        snapshot.num_prompt_tokens,
        snapshot.num_generation_tokens,
        snapshot.num_finished,
        snapshot.num_prefix_queries,
        snapshot.num_mm_queries,
    )


def _format_share(num_hits: float, num_queries: float) -> str:
    return f"{num_hits / num_queries:.1%}" if num_queries > 0 else "n/a"


class LogLine:
    """Makes the log line from the values that `read` returns.

    `started` is a time of the same clock as the times that `take` gets.
    """

    def __init__(self, read: Callable[[], Values], *, started: float) -> None:
        self._read = read
        self._last = Snapshot()
        self._taken = started

    def take(self, now: float) -> str | None:
        """Return the line for the time since the last call, or `None` if nothing happened in it."""
        last, self._last = self._last, _take_snapshot(self._read())
        seconds, self._taken = now - self._taken, now
        return format_line(last, self._last, seconds=max(seconds, 1e-3))


async def log_load(metrics_directory: Path) -> None:
    """Log the line every few seconds, until this task is cancelled."""
    files = Files(metrics_directory)
    line = LogLine(lambda: Values(files), started=time.monotonic())
    while True:
        await asyncio.sleep(_PAUSE_S)
        try:
            # In a thread, because reading many files would delay the event loop.
            text = await asyncio.to_thread(line.take, time.monotonic())
        except Exception:  # a server must not end because of a line in its log
            logger.warning("the metrics could not be read", exc_info=True)
            continue
        if text is not None:
            logger.info("%s", text)
