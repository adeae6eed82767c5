"""The metrics of a cluster are sums of those of its processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sensorium.scale.metrics import ClusterMetrics, Sums, encode_samples
from sensorium.server.http.administration import get_load
from sensorium.server.metrics.shared_files import Values


def _make_part(*, count: int, share: float, seconds: float) -> bytes:
    registry = CollectorRegistry()
    Counter("requests_total", "Requests.", ["how"], registry=registry).labels("well").inc(count)
    Gauge("usage_perc", "A share.", registry=registry).set(share)
    Gauge("running", "Requests.", registry=registry).set(count)
    Histogram("wait", "Seconds.", registry=registry, buckets=(1.0, 2.0)).observe(seconds)
    return encode_samples(registry)


def test_counts_are_added_and_shares_are_averaged() -> None:
    parts = [
        _make_part(count=3, share=0.5, seconds=0.5),
        _make_part(count=4, share=0.25, seconds=1.5),
        _make_part(count=0, share=0.0, seconds=9.0),
    ]
    values = Values(Sums(parts))
    assert values.get("requests_total", how="well") == 7
    assert values.get("running") == 7
    assert values.get("usage_perc") == 0.375
    assert values.get("wait_bucket", le="1.0") == 1
    assert values.get("wait_bucket", le="2.0") == 2
    assert values.get("wait_count") == 3
    assert not [name for name in values.names if name.endswith("_created")]


def test_gauges_that_processes_share_are_not_added_up() -> None:
    """Engines on one machine report the contents of the same disk cache."""

    def make(level: str, number: int) -> bytes:
        registry = CollectorRegistry()
        gauge = Gauge("sensorium:cache_bytes", "Bytes.", ["level"], registry=registry)
        gauge.labels(level).set(number)
        return encode_samples(registry)

    for level, together in (("disk", 7), ("remote", 7), ("encoder", 12)):
        values = Values(Sums([make(level, number) for number in (5, 7, 0)]))
        assert values.get("sensorium:cache_bytes", level=level) == together


def test_a_frontend_adds_its_own_counts_to_those_of_others() -> None:
    async def read_others() -> list[bytes]:
        return [other.encode_own()]

    other = ClusterMetrics("m", read_others)
    other.count_retry("lost")
    own = ClusterMetrics("m", read_others)
    own.count_retry("lost")
    own.count_retry("moved")
    own.follow_placements(placed=5, spilled=2)
    own.follow_placements(placed=6, spilled=2)
    others = asyncio.run(own.read_others())
    page = own.render(others)[0].decode()
    assert 'sensorium:scale_retries_total{model_name="m",reason="lost"} 2.0' in page
    assert 'sensorium:scale_retries_total{model_name="m",reason="moved"} 1.0' in page
    assert 'sensorium:scale_requests_total{model_name="m"} 6.0' in page
    assert 'sensorium:scale_spills_total{model_name="m"} 2.0' in page
    assert own.get_load(others) == 0


def test_no_thread_waits_for_the_metrics_of_a_process_that_hangs() -> None:
    """Threads are few, and requests with large files need them."""

    async def read_others() -> list[bytes]:
        await asyncio.Event().wait()
        return []

    async def run() -> str:
        context = cast(Any, SimpleNamespace(metrics=ClusterMetrics("m", read_others)))
        readers = [asyncio.create_task(get_load(cast(Any, None), context)) for _ in range(100)]
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 120)
        finally:
            for reader in readers:
                reader.cancel()

    assert asyncio.run(run()) == "done"
