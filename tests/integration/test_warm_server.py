"""A server that says that it is ready is warm: its model, and its processes for media."""

from __future__ import annotations

import re
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.server import ServerProcess

_WARM = re.compile(r"Model warmup completed in [\d.]+s \(text, image, video, audio\)")
# Series of processes, of the loop that measures itself, and of the request for the metrics.
_OTHERS = ("process_", "python_", "http_", "sensorium:event_loop_lag")


def read_counts(text: str) -> dict[tuple[Any, ...], float]:
    """Return all that is counted: counters, and the numbers of values in histograms."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith(("_total", "_count")) and not sample.name.startswith(_OTHERS)
    }


def read_gauge(text: str, name: str) -> float:
    families = text_string_to_metric_families(text)
    return sum(s.value for f in families for s in f.samples if s.name == name)


def test_every_modality_is_rehearsed_before_the_server_is_ready(
    shared_server: ServerProcess,
) -> None:
    output = shared_server.output
    said = output[: output.index("Sensorium is ready")]
    assert len(_WARM.findall(said)) == 2  # a line of each frontend


def test_pool_workers_have_imported_before_the_server_is_ready(
    shared_server: ServerProcess,
) -> None:
    assert read_gauge(shared_server.first_metrics, "sensorium:pool_workers") == 2
    assert read_gauge(shared_server.first_metrics, "sensorium:pool_queued") == 0


def test_the_counts_of_a_server_begin_at_zero(shared_server: ServerProcess) -> None:
    counts = read_counts(shared_server.first_metrics)
    assert len(counts) > 50
    assert {key: value for key, value in counts.items() if value} == {}
    for name in ("sensorium:cache_items", "sensorium:cache_bytes", "vllm:kv_cache_usage_perc"):
        assert read_gauge(shared_server.first_metrics, name) == 0
