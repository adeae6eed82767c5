"""The log line with the rates of a server."""

from __future__ import annotations

import pytest

from sensorium.server.metrics.metric_set import MetricSet
from sensorium.server.metrics.shared_files import LogLine, Values


@pytest.fixture
def metrics() -> MetricSet:
    """Metrics of a server that has worked already, and has nothing to do now."""
    metrics = MetricSet("tiny")
    add(metrics, prompt_tokens=1000, generation_tokens=500)
    add(metrics, prefix_cache_queries=1000, prefix_cache_hits=100)
    add(metrics, mm_cache_queries=100, mm_cache_hits=90)
    metrics.counter("vllm:request_success_total", "stop").inc(10)
    return metrics


@pytest.fixture
def line(metrics: MetricSet) -> LogLine:
    line = LogLine(lambda: Values(metrics.registry), started=0.0)
    assert line.take(10.0) is not None
    return line


def add(metrics: MetricSet, **counts: int) -> None:
    for name, count in counts.items():
        metrics.counter(f"vllm:{name}_total").inc(count)


def test_rates_and_shares_are_those_of_the_time_between(metrics: MetricSet, line: LogLine) -> None:
    metrics.gauge("vllm:num_requests_running").set(3)
    metrics.gauge("vllm:num_requests_waiting").set(2)
    metrics.gauge("sensorium:num_requests_preparing").set(1)
    metrics.gauge("vllm:kv_cache_usage_perc").set(0.1243)
    add(metrics, prompt_tokens=8120, generation_tokens=1203)
    add(metrics, prefix_cache_queries=1000, prefix_cache_hits=451)
    add(metrics, mm_cache_queries=374, mm_cache_hits=364)
    assert line.take(20.0) == (
        "Running: 3, waiting: 2, preparing: 1 | prompt 812.0 tok/s, generation 120.3 tok/s | "
        "KV cache 12.4% | Prefix cache hit rate: 45.1% | MM cache hit rate: 97.3%"
    )


def test_no_line_is_logged_if_nothing_happened(line: LogLine) -> None:
    assert line.take(20.0) is None


@pytest.mark.parametrize(
    "name",
    [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "sensorium:num_requests_preparing",
    ],
)
def test_a_waiting_request_is_logged(metrics: MetricSet, line: LogLine, name: str) -> None:
    metrics.gauge(name).set(1)
    assert line.take(20.0) is not None
    assert line.take(30.0) is not None  # it waits still


@pytest.mark.parametrize("name", ["prefix_cache_queries", "mm_cache_queries", "generation_tokens"])
def test_a_finished_request_is_logged_once(metrics: MetricSet, line: LogLine, name: str) -> None:
    add(metrics, **{name: 1})
    assert line.take(20.0) is not None
    assert line.take(30.0) is None


def test_a_rate_without_queries_is_not_available(metrics: MetricSet, line: LogLine) -> None:
    metrics.counter("vllm:request_success_total", "stop").inc()
    text = line.take(20.0)
    assert text is not None
    assert text.endswith("Prefix cache hit rate: n/a | MM cache hit rate: n/a")


def test_each_line_covers_the_time_since_the_last_one(metrics: MetricSet, line: LogLine) -> None:
    add(metrics, generation_tokens=50)
    assert "generation 5.0 tok/s" in (line.take(20.0) or "")
    add(metrics, generation_tokens=50, mm_cache_queries=4, mm_cache_hits=3)
    metrics.gauge("vllm:kv_cache_usage_perc").set(0.5)
    text = line.take(25.0) or ""
    assert "generation 10.0 tok/s | KV cache 50.0%" in text
    assert "MM cache hit rate: 75.0%" in text
    assert line.take(35.0) is None


def test_the_first_line_counts_from_the_start() -> None:
    metrics = MetricSet("tiny")
    line = LogLine(lambda: Values(metrics.registry), started=0.0)
    add(metrics, generation_tokens=50)
    assert "generation 5.0 tok/s" in (line.take(10.0) or "")
