"""Several processes write, any of them reads, and some die."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sensorium.server.metrics.metric_set import ALIASES, DEFINITIONS
from sensorium.server.metrics.shared_files import clear_gauges
from sensorium.types.request import FinishReason
from tests.unit.server.metrics import writers

pytestmark = pytest.mark.processes

SERIES = Path(__file__).parent / "dashboard_series.txt"
FRONTEND = """
import sys
from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams
metrics = FrontendMetrics("tiny")
num_ended, num_open = int(sys.argv[1]), int(sys.argv[2])
for _ in range(num_ended):
    clock = metrics.start_request(arrived=0.0, params=SamplingParams())
    clock.on_tokens(0, 3)
    clock.on_end(FinishReason.ABORT)
arrivals = [metrics.track_arrival() for _ in range(num_open)]
for arrival in arrivals:
    arrival.__enter__()
metrics.sync(num_preparing=num_open)
"""
READER = """
from sensorium.server.metrics.frontend import FrontendMetrics
metrics = FrontendMetrics("tiny")
body, content_type = metrics.render()
print(content_type)
print(metrics.get_load())
print(body.decode())
"""
HEAVY = ("torch", "numpy", "transformers", "PIL")
pytestmark = pytest.mark.processes
SERVING_PARTS = ("frontend", "shared_files", "metric_set")


def make_frontend(directory: Path, *, num_ended: int, num_open: int) -> subprocess.Popen[str]:
    return writers.start(FRONTEND, directory, [str(num_ended), str(num_open)])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two frontends that write into `tmp_path`."""
    frontends = [
        make_frontend(tmp_path, num_ended=2, num_open=1),
        make_frontend(tmp_path, num_ended=5, num_open=3),
    ]
    yield frontends
    for frontend in frontends:
        if frontend.returncode is None:
            writers.end(frontend)


@pytest.mark.usefixtures("pair")
def test_values_are_sums_over_the_processes(tmp_path: Path) -> None:
    values = writers.read(tmp_path)
    assert values.get("vllm:request_success_total", finished_reason="abort") == 7
    assert values.get("vllm:generation_tokens_total", model_name="tiny", engine="0") == 21
    assert values.get("vllm:time_to_first_token_seconds_count") == 7
    assert values.get("sensorium:http_requests_in_flight") == 4
    assert values.get("sensorium:num_requests_preparing") == 4


def test_a_killed_process_leaves_its_counters_and_takes_its_gauges(
    tmp_path: Path, pair: list[subprocess.Popen[str]]
) -> None:
    writers.kill(pair[1])
    clear_gauges(str(pair[1].pid), tmp_path)
    values = writers.read(tmp_path)
    assert values.get("vllm:request_success_total", finished_reason="abort") == 7
    assert values.get("vllm:time_to_first_token_seconds_count") == 7
    assert values.get("sensorium:http_requests_in_flight") == 1
    again = make_frontend(tmp_path, num_ended=1, num_open=2)
    values = writers.read(tmp_path)
    assert values.get("vllm:request_success_total", finished_reason="abort") == 8
    assert values.get("sensorium:http_requests_in_flight") == 3
    writers.end(again)


@pytest.mark.usefixtures("pair")
def test_any_process_can_report_the_metrics_of_all(tmp_path: Path) -> None:
    content_type, load, text = writers.run(READER, tmp_path).split("\n", 2)
    assert content_type.startswith("text/plain")
    assert load == "4"
    families = {family.name: family for family in text_string_to_metric_families(text)}
    aborted = [
        sample.value
        for sample in families["vllm:request_success"].samples
        if sample.labels["finished_reason"] == "abort"
    ]
    assert aborted == [7]
    assert families["vllm:e2e_request_latency_seconds"].type == "histogram"


def test_restarts_that_the_parent_counts_are_among_the_rest(tmp_path: Path) -> None:
    script = """
import os, pathlib
directory = pathlib.Path(os.environ.pop("PROMETHEUS_MULTIPROC_DIR"))
from sensorium.server.metrics.metric_set import MetricSet
from sensorium.server.metrics.shared_files import use_directory
use_directory(directory, writer="parent")
metrics = MetricSet("tiny")
for kind in ("core", "core", "frontend"):
    metrics.counter("sensorium:process_restarts_total", kind).inc()
"""
    parent = writers.start(script, tmp_path)
    values = writers.read(tmp_path)
    assert values.get("sensorium:process_restarts_total", kind="core") == 2
    assert values.get("sensorium:process_restarts_total", kind="frontend") == 1
    writers.end(parent)


def test_a_file_that_has_just_been_made_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "counter_1.db").touch()
    assert writers.read(tmp_path).names == frozenset()


def test_all_series_are_there_before_anything_happened(tmp_path: Path) -> None:
    _, _, text = writers.run(READER, tmp_path).split("\n", 2)
    families = list(text_string_to_metric_families(text))
    dynamic = {"vllm:cache_config_info", "sensorium:media_refusals_total"}
    expected = {
        each.name.removesuffix("_total") for each in DEFINITIONS if each.name not in dynamic
    }
    # A histogram keeps the end of its name.
    expected = (
        (expected - {"vllm:iteration_tokens"}) | {"vllm:iteration_tokens_total"} | set(ALIASES)
    )
    assert {family.name for family in families} == expected
    for family in families:
        assert {sample.value for sample in family.samples} == {0.0}
    (success,) = (family for family in families if family.name == "vllm:request_success")
    reasons = {sample.labels["finished_reason"] for sample in success.samples}
    assert reasons == {str(reason) for reason in FinishReason}
    for sample in success.samples:
        assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")


CORE = """
from sensorium.server.metrics.core import CoreMetrics
from sensorium.server.metrics.shared_files import render, Files
from sensorium.server.metrics.shared_files import get_directory
from tests.unit.server.metrics.cores import make_core
CoreMetrics("tiny").sync(make_core())
print(render(Files(get_directory()))[0].decode())
"""


def test_the_panels_of_known_dashboards_find_their_series(tmp_path: Path) -> None:
    text = writers.run(CORE, tmp_path)
    found = set()
    for line in text.splitlines():
        name, _, labels = line.rpartition(" ")[0].partition("{")
        found.add(name)
        found |= {f"{name}{{{label}}}" for label in labels.rstrip("}").split(",")}
    wanted = {line for line in SERIES.read_text().splitlines() if not line.startswith("#")}
    assert wanted - found == set()


@pytest.mark.parametrize("part", SERVING_PARTS)
def test_metrics_are_loaded_without_torch_and_without_a_directory(
    part: str, tmp_path: Path
) -> None:
    script = (
        f"import sys, sensorium.server.metrics.{part}\n"
        f"print(*sorted(set(sys.modules) & {set(HEAVY)}))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | {"PYTHONPATH": str(writers.ROOT / "src")},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout.strip() == ""
    assert list(tmp_path.iterdir()) == []
