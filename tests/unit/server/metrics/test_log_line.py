"""The line that says how it goes."""

from __future__ import annotations

from dataclasses import replace

from sensorium.server.metrics.collect import LogLine, Snapshot, Values, format_line
from sensorium.server.metrics.metric_set import MetricSet

LAST = Snapshot(
    num_prompt_tokens=1000,
    num_generation_tokens=500,
    num_finished=10,
    num_prefix_queries=1000,
    num_prefix_hits=100,
    num_mm_queries=100,
    num_mm_hits=90,
)


def test_rates_and_shares_are_those_of_the_time_between() -> None:
    now = Snapshot(
        num_running=3,
        num_waiting=2,
        num_preparing=1,
        kv_cache_usage=0.1243,
        num_prompt_tokens=9120,
        num_generation_tokens=1703,
        num_finished=12,
        num_prefix_queries=2000,
        num_prefix_hits=551,
        num_mm_queries=474,
        num_mm_hits=454,
    )
    assert format_line(LAST, now, seconds=10.0) == (
        "Running: 3, waiting: 2, preparing: 1 | prompt 812.0 tok/s, generation 120.3 tok/s | "
        "KV cache 12.4% | Prefix cache hit rate: 45.1% | MM cache hit rate: 97.3%"
    )


def test_nothing_that_happened_is_no_line() -> None:
    assert format_line(LAST, LAST, seconds=10.0) is None


def test_a_request_that_only_waits_is_something() -> None:
    for name in ("num_running", "num_waiting", "num_preparing"):
        assert format_line(LAST, replace(LAST, **{name: 1.0}), seconds=10.0) is not None


def test_a_request_that_came_and_went_is_something() -> None:
    for name in ("num_finished", "num_mm_queries", "num_generation_tokens"):
        now = replace(LAST, **{name: 1_000.0})
        assert format_line(LAST, now, seconds=10.0) is not None


def test_a_share_of_nothing_is_not_given() -> None:
    line = format_line(LAST, replace(LAST, num_finished=11), seconds=10.0)
    assert line is not None
    assert line.endswith("Prefix cache hit rate: n/a | MM cache hit rate: n/a")


def test_each_line_begins_where_the_last_one_ended() -> None:
    metrics = MetricSet("tiny")
    line = LogLine(lambda: Values(metrics.registry), started=0.0)
    assert line.take(10.0) is None
    metrics.counter("vllm:generation_tokens_total").inc(50)
    assert "generation 5.0 tok/s" in (line.take(20.0) or "")
    metrics.counter("vllm:generation_tokens_total").inc(50)
    metrics.counter("vllm:mm_cache_queries_total").inc(4)
    metrics.counter("vllm:mm_cache_hits_total").inc(3)
    metrics.gauge("vllm:kv_cache_usage_perc").set(0.5)
    text = line.take(25.0) or ""
    assert "generation 10.0 tok/s | KV cache 50.0%" in text
    assert "MM cache hit rate: 75.0%" in text
    assert line.take(35.0) is None
