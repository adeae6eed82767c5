"""The table of series is whole, and so is the page that explains it."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client import Histogram

from sensorium.server.metrics.metric_set import ALIASES, DEFINITIONS, MetricSet
from sensorium.types.errors import InvariantError
from tests.unit.server.metrics.writers import ROOT


def test_every_series_is_defined_once_and_explained() -> None:
    names = [definition.name for definition in DEFINITIONS] + list(ALIASES)
    assert [name for name, count in Counter(names).items() if count > 1] == []
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_page_explains_only_metrics_that_exist() -> None:
    names = {definition.name for definition in DEFINITIONS} | set(ALIASES)
    words = (ROOT / "docs" / "metrics.md").read_text().split("`")[1::2]
    series = {
        word for word in words if word.startswith(("vllm:", "sensorium:")) and word[-1] != ":"
    }
    assert {word for word in series if not word.endswith("…")} - names == set()


def test_buckets_of_histograms_ascend() -> None:
    for definition in DEFINITIONS:
        assert (definition.kind is Histogram) == bool(definition.buckets)
        assert list(definition.buckets) == sorted(set(definition.buckets))


def test_a_metric_is_only_accessible_by_its_kind() -> None:
    metrics = MetricSet("tiny")
    with pytest.raises(InvariantError, match="is no counter"):
        metrics.counter("vllm:num_requests_running")
    with pytest.raises(InvariantError, match="is no gauge"):
        metrics.gauge("vllm:prompt_tokens_total")
    with pytest.raises(InvariantError, match="is no histogram"):
        metrics.histogram("vllm:prompt_tokens_total")
