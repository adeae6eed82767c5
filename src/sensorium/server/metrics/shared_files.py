"""The files in which a server's processes write their metrics, and from which any reads all.

`prometheus_client` writes memory-mapped files in a directory. If the disk is full, the first access
to a page that has no block ends the process with SIGBUS. So the files here are links to anonymous
memory (`memfd_create`), which is reserved when it is made, has no name and needs no disk. The links
lead through `/proc/PID/fd` of the parent, so that the children inherit no descriptors.

A writer's files outlive it: the next process with its name continues with their numbers. Counters
of dead processes stay. The parent sets the gauges of a dead process to 0 as soon as it has seen the
end.

The parent logs a line every few seconds while there is something to do, with the rates since the
last line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest, values
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from sensorium.server.metrics.metric_set import ALIASES

logger = logging.getLogger(__name__)
PARENT = "parent"
CORE = "core"
_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # the only way to tell `prometheus_client` the directory
# Kind of file, as `prometheus_client` names it -> bytes that are reserved for it. That is about
# twice what all series of the table take. A file that needs more grows, and takes memory then.
_NUM_BYTES = {"counter": 2**16, "gauge_livesum": 2**16, "histogram": 2**18}
_PAUSE_S = 10.0  # between two log lines


# ---- writing


def get_frontend_name(index: int) -> str:
    return f"frontend-{index}"


def get_path(directory: Path, kind: str, writer: str) -> Path:
    """Return the path of the file with one process's metrics of a kind, such as "counter"."""
    return directory / f"{kind}_{writer}.db"


@contextmanager
def making_files(directory: Path, *, num_frontends: int) -> Iterator[None]:
    """Create a directory with the metrics files of all processes, for the time of the block.

    Their memory is freed when no process maps it any more. Raise an `OSError` if it can't be
    reserved.
    """
    with ExitStack() as stack:
        directory.mkdir()
        for writer in (PARENT, CORE, *map(get_frontend_name, range(num_frontends))):
            for kind, num_bytes in _NUM_BYTES.items():
                fd = os.memfd_create("sensorium-metrics", os.MFD_CLOEXEC)
                stack.callback(os.close, fd)
                os.posix_fallocate(fd, 0, num_bytes)
                get_path(directory, kind, writer).symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
        yield


def use_directory(directory: Path, *, writer: str) -> None:
    """Make this process write its metrics to the files of `writer` in a directory.

    The processes that it starts from now on inherit the directory, and choose their own files with
    `write_as`. Only one process at a time may write to the files of a name.
    """
    os.environ[_VARIABLE] = str(directory)
    write_as(writer)


def write_as(writer: str) -> None:
    """Make this process write its metrics to the files of `writer`, if it inherited a directory.

    Otherwise the metrics stay in this process's memory. Metrics that already exist do not move.
    """
    if get_directory() is not None:
        values.ValueClass = values.MultiProcessValue(lambda: writer)  # type: ignore[no-untyped-call]


def get_directory() -> Path | None:
    """Return the directory of the metrics files, or `None` if this process has none."""
    directory = os.environ.get(_VARIABLE)
    return None if directory is None else Path(directory)


def clear_gauges(writer: str, directory: Path) -> None:
    """Set all gauges of a process that has ended to 0, so that sums no longer include them.

    The layout of its file does not change, because a reader may be reading it, and the next process
    with this name continues with it.
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


def _get_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # the server is ending
        return 0


# ---- reading


class Files(Collector):
    """A Prometheus collector that adds up the metrics files that match `pattern`."""

    def __init__(self, directory: Path, pattern: str = "*.db") -> None:
        self._directory = directory
        self._pattern = pattern

    def collect(self) -> Iterable[Metric]:
        # A file is empty for a moment after it was made.
        paths = [str(path) for path in self._directory.glob(self._pattern) if _get_size(path)]
        merged: Iterable[Metric] = MultiProcessCollector.merge(paths)  # type: ignore[no-untyped-call]
        return merged


class Values:
    """A snapshot of the values of all metrics of a Prometheus collector."""

    def __init__(self, source: Collector) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for metric in source.collect():
            for sample in metric.samples:
                rows = self._samples.setdefault(sample.name, [])
                rows.append((sample.labels, sample.value))

    def get(self, name: str, **labels: str) -> float:
        """Return the sum of all samples with this name and at least these labels, or 0."""
        rows = self._samples.get(name, ())
        return sum(value for own, value in rows if labels.items() <= own.items())

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._samples)


def render(source: Collector) -> tuple[bytes, str]:
    """Return metrics, also under their aliases, as Prometheus text, and its content type."""
    registry = CollectorRegistry()
    registry.register(_WithAliases(source))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _WithAliases(Collector):
    """A collector of all metrics of `source`, and of copies under their aliases."""

    def __init__(self, source: Collector) -> None:
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


# ---- the log line


class LogLine:
    """A maker of log lines about the server's load; callers pass the time in seconds."""

    def __init__(self, read: Callable[[], Values], *, started: float) -> None:
        self._read = read
        self._last = Values(CollectorRegistry())
        self._taken = started

    def take(self, now: float) -> str | None:
        """Return the line for the time since the last call, or `None` if the server was idle."""
        last, self._last = self._last, self._read()
        seconds, self._taken = max(now - self._taken, 1e-3), now
        return _format_line(last, self._last, seconds)


def _format_line(last: Values, now: Values, seconds: float) -> str | None:
    def count(name: str) -> float:
        return now.get(f"vllm:{name}_total") - last.get(f"vllm:{name}_total")

    def format_share(cache: str) -> str:
        num_queries = count(f"{cache}_queries")
        return f"{count(f'{cache}_hits') / num_queries:.1%}" if num_queries > 0 else "n/a"

    num_running = now.get("vllm:num_requests_running")
    num_waiting = now.get("vllm:num_requests_waiting")
    num_preparing = now.get("sensorium:num_requests_preparing")
    num_prompt_tokens, num_tokens = count("prompt_tokens"), count("generation_tokens")
    events = (num_running, num_waiting, num_preparing, num_prompt_tokens, num_tokens)
    others = ("request_success", "prefix_cache_queries", "mm_cache_queries")
    if not any(events) and not any(map(count, others)):
        return None
    return (
        f"Running: {num_running:.0f}, waiting: {num_waiting:.0f}, preparing: {num_preparing:.0f} | "
        f"prompt {num_prompt_tokens / seconds:.1f} tok/s, "
        f"generation {num_tokens / seconds:.1f} tok/s | "
        f"KV cache {now.get('vllm:kv_cache_usage_perc'):.1%} | "
        f"Prefix cache hit rate: {format_share('prefix_cache')} | "
        f"MM cache hit rate: {format_share('mm_cache')}"
    )


async def log_load(metrics_directory: Path) -> None:
    """Log the server's load every 10 seconds, unless nothing happened, until this is cancelled."""
    files = Files(metrics_directory)
    line = LogLine(lambda: Values(files), started=time.monotonic())
    while True:
        await asyncio.sleep(_PAUSE_S)
        try:
            # In a thread, because reading many files would delay the event loop.
            text = await asyncio.to_thread(line.take, time.monotonic())
        except Exception:  # a server must not end because of a line in its log
            logger.warning("the metrics could not be read, so no load is logged", exc_info=True)
            continue
        if text is not None:
            logger.info("%s", text)
