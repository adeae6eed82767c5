"""Keeps a server at saturation for minutes: nothing may be lost, be wrong, grow or hang.

A real server on a tiny model with pictures, video and audio, and with caches so small that they
evict all the time. Clients ask without a pause: good requests of all kinds, half of them streamed;
one in five is bad; one in seven leaves at a random moment. Every answer is checked: its status, its
end, and that a greedy answer is the same each time. At the end nothing may be in flight, and the
server must have counted what the clients counted.

Memory is what each process has for itself (USS), as the median of a window after the warm-up and
of the last one; what the caches have grown between them is subtracted. `bare loop`: how late an
event loop is that does nothing, in a process of its own at the same time: the machine's share.

python benchmarks/soak.py [--seconds S] [--clients N] [--frontends N] [--record]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live_server import LiveServer, get_quantile_bound, is_healthy, read_metrics
from process_samples import ProcessSample, sample_tree, summarise
from records import write_record
from soak_clients import SoakClients, SoakCounts
from soak_requests import RequestMaker

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from make_tiny_models import make_family

MODEL = "qwen2_5_omni"
MODALITIES = ("image", "video", "audio")
LAG = "sensorium:event_loop_lag_seconds"
LAG_LIMIT_S = 0.05
_FLAGS = (
    *("--port", "0", "--max-model-len", "512", "--max-num-seqs", "16"),
    *("--mm-processor-cache-gb", "0.02", "--encoder-cache-size", "1024"),
    *("--kv-cache-memory-bytes", "8M", "--shutdown-timeout", "10"),
)
_IDLE_S = 30.0
_SAMPLE_S = 1.0
_EARLY = (0.25, 0.4)  # shares of the time: after the warm-up, and the end
_LATE = (0.85, 1.0)
# The lags of a loop that only sleeps, in milliseconds, when its input ends.
_BARE_LOOP = """
import asyncio, sys, threading, time
lags, ended = [], threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
async def main():
    while not ended.is_set():
        before = time.monotonic()
        await asyncio.sleep(0.05)
        lags.append(time.monotonic() - before - 0.05)
asyncio.run(main())
print(sorted(lags)[int(0.99 * len(lags))] * 1000)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRun:
    """All that was seen. `before`, `after`: metrics; `levels`: of caches, at every sample."""

    seconds: float
    counts: SoakCounts
    samples: list[ProcessSample]
    levels: list[tuple[float, float]]
    before: dict[str, float]
    after: dict[str, float]
    bare_loop_ms: float
    log: str


class Sampler:
    """Looks at the server's processes in a thread of its own."""

    def __init__(self, pid: int, url: str) -> None:
        self.samples: list[ProcessSample] = []
        self.levels: list[tuple[float, float]] = []
        self._pid = pid
        self._url = url
        self._begun = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            seconds = time.monotonic() - self._begun
            self.samples += sample_tree(self._pid, seconds=seconds)
            metrics = read_metrics(self._url)
            kept = sum(
                value
                for name, value in metrics.items()
                if name.startswith("sensorium:cache_bytes{") and '"prefix"' not in name
            )
            self.levels.append((seconds, kept))


def soak(
    model: str, *, seconds: float, num_clients: int, num_frontends: int = 1, seed: int = 0
) -> SoakRun:
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        flags = (*_FLAGS, "--api-server-count", str(num_frontends))
        with LiveServer(model, *flags, log=log) as server:
            url = server.wait_for_url()
            maker = RequestMaker(seed, modalities=MODALITIES)
            asyncio.run(_warm_up(url, maker))
            before = read_metrics(url)
            clients = SoakClients(url, maker, seed=seed)
            sampler = Sampler(server.process.pid, url)
            with _start_bare_loop() as bare_loop:
                try:
                    asyncio.run(clients.run(num_clients=num_clients, seconds=seconds))
                finally:
                    sampler.stop()
                bare_loop_ms = float(bare_loop.communicate("")[0])
            after = wait_until_idle(url)
        return SoakRun(
            seconds=seconds,
            counts=clients.counts,
            samples=sampler.samples,
            levels=sampler.levels,
            before=before,
            after=after,
            bare_loop_ms=bare_loop_ms,
            log=log.read_text(),
        )


async def _warm_up(url: str, maker: RequestMaker) -> None:
    """Let a few clients ask first, because the first items wait for the pool to start."""
    await SoakClients(url, maker, seed=1).run(num_clients=4, seconds=3.0)


def _start_bare_loop() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _BARE_LOOP]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def get_in_flight(metrics: dict[str, float]) -> dict[str, float]:
    """Return the series that must be 0 when no request runs."""
    pinned = "sensorium:encoder_cache_used_embeds", "sensorium:encoder_cache_evictable_embeds"
    names = (
        "sensorium:http_requests_in_flight",
        "sensorium:num_requests_preparing",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "sensorium:pool_queued",
        "sensorium:pool_running",
    )
    return {name: metrics[name] for name in names} | {
        "pinned embeddings": metrics[pinned[0]] - metrics[pinned[1]]
    }


def wait_until_idle(url: str) -> dict[str, float]:
    """Return the metrics when nothing is in flight, or when waiting is of no use any more."""
    deadline = time.monotonic() + _IDLE_S
    while True:
        metrics = read_metrics(url)
        if not any(get_in_flight(metrics).values()) or time.monotonic() > deadline:
            if not is_healthy(url):
                raise SystemExit("the server is not healthy")
            return metrics
        time.sleep(0.5)


def list_faults(run: SoakRun) -> list[str]:
    """List what must not happen on any machine: wrong answers, wrong counts, things left over."""
    faults = list(run.counts.mistakes)
    faults += [f"{value:g} {name}" for name, value in get_in_flight(run.after).items() if value]
    for name, number, slack in _list_counts(run):
        counted = sum(
            value - run.before.get(key, 0.0) for key, value in run.after.items() if name in key
        )
        if not number <= counted <= number + slack:
            faults.append(f"{name}: {counted:g}, the clients count {number} to {number + slack}")
    faults += ["the log has a traceback"] if "Traceback" in run.log else []
    return faults


def _list_counts(run: SoakRun) -> list[tuple[str, int, int]]:
    """Return parts of series' names, their expected sums, and how much more they may be.

    More is allowed because requests of clients that left may have been answered.
    """
    counts = run.counts
    num_good = counts.num_statuses[200]
    num_bad = counts.num_statuses.total() - num_good
    ended = "vllm:request_success_total{finished_reason"
    num_left, num_left_completions = counts.num_aborted, counts.num_aborted_completions
    return [
        ('method="POST",status="2xx"', num_good, num_left),
        ('method="POST",status="4xx"', num_bad, 0),
        ('method="POST",status="5xx"', 0, 0),
        ("sensorium:refused_requests_total", num_bad, 0),
        (f'{ended}="length"', counts.num_ends["length"], num_left_completions),
        (f'{ended}="stop"', counts.num_ends["stop"], num_left_completions),
        (f'{ended}="error"', 0, num_bad),  # those that the engine refused, not the HTTP layer
    ]


def make_figures(run: SoakRun) -> dict[str, Any]:
    windows = [(low * run.seconds, high * run.seconds) for low, high in (_EARLY, _LATE)]
    memory = summarise(run.samples, windows=windows)
    caches = [
        statistics.median([size for at, size in run.levels if low <= at < high] or [0.0])
        for low, high in windows
    ]
    grown_kib = {
        role: round(sizes["uss_kib"][1] - sizes["uss_kib"][0]) for role, sizes in memory.items()
    }
    counts = run.counts
    return {
        "seconds": run.seconds,
        "requests": counts.num_sent,
        "requests_per_s": round(counts.num_sent / run.seconds, 1),
        "answers": dict(sorted(counts.num_answers.items())),
        "statuses": {str(status): number for status, number in sorted(counts.num_statuses.items())},
        "left": counts.num_aborted,
        "tokens": counts.num_tokens,
        "seconds_of_answers_p50": round(statistics.median(counts.seconds or [0.0]), 3),
        "seconds_of_answers_max": round(max(counts.seconds, default=0.0), 3),
        "loop_lag_p99_at_most_s": get_quantile_bound(run.before, run.after, LAG, 0.99),
        "loop_lag_p50_at_most_s": get_quantile_bound(run.before, run.after, LAG, 0.5),
        "loop_lag_share_below_50_ms": round(_get_share_below(run, LAG_LIMIT_S), 5),
        "bare_loop_lag_p99_ms": round(run.bare_loop_ms, 1),
        "evictions": _get_evictions(run),
        "memory": memory,
        "grown_kib": grown_kib,
        "caches_grown_kib": round((caches[1] - caches[0]) / 1024),
        "faults": list_faults(run),
    }


def _get_share_below(run: SoakRun, seconds: float) -> float:
    def count(suffix: str) -> float:
        name = LAG + suffix
        return run.after[name] - run.before[name]

    return count(f'_bucket{{le="{seconds}"}}') / count("_count")


def _get_evictions(run: SoakRun) -> dict[str, float]:
    prefix = "sensorium:cache_evictions_total{"
    return {
        name.removeprefix(prefix).removesuffix("}"): value - run.before.get(name, 0.0)
        for name, value in run.after.items()
        if name.startswith(prefix)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="default 600")
    parser.add_argument("--clients", type=int, default=24, help="at once (default 24)")
    parser.add_argument("--frontends", type=int, default=1, help="default 1")
    parser.add_argument("--record", action="store_true", help="write benchmarks/records/soak.json")
    arguments = parser.parse_args()
    model = make_family(MODEL, Path(__file__).parent.parent / "build" / "tiny-models")
    run = soak(
        str(model),
        seconds=arguments.seconds,
        num_clients=arguments.clients,
        num_frontends=arguments.frontends,
    )
    figures = {"num_clients": arguments.clients, "num_frontends": arguments.frontends}
    figures |= make_figures(run)
    if arguments.record:
        print(f"record: {write_record('soak', figures).name}")
    print(json.dumps(figures, indent=1) if sys.stdout.isatty() else json.dumps(figures))
    if figures["faults"]:
        raise SystemExit(f"{len(figures['faults'])} faults")


if __name__ == "__main__":
    main()
