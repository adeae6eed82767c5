"""Metrics lie in memory that needs no disk, and that the next life of a process goes on with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sensorium.server.metrics.collect import clear_gauges
from sensorium.server.metrics.memory import MetricMemory, get_path, list_writers
from tests.unit.server.metrics import writers

FRONTEND = """
from sensorium.server.metrics.metric_set import write_as
write_as("frontend-0")
from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.types.request import FinishReason
metrics = FrontendMetrics("tiny")
metrics.start_request().on_end(FinishReason.ABORT)
metrics.track_arrival().__enter__()
"""


def count_aborts(directory: Path) -> float:
    values = writers.read(directory)
    return values.get("vllm:request_success_total", finished_reason="abort")


def test_files_are_links_to_memory_that_is_reserved(tmp_path: Path) -> None:
    with MetricMemory(tmp_path / "metrics", list_writers(2)) as memory:
        paths = list(memory.directory.iterdir())
        assert len(paths) == 3 * 4
        for path in paths:
            assert os.readlink(path).startswith(f"/proc/{os.getpid()}/fd/")
            assert path.stat().st_blocks * 512 >= path.stat().st_size > 0
        assert writers.read(memory.directory).names == frozenset()
    assert not any(path.exists() for path in paths)


def test_the_next_life_goes_on_with_counters_and_begins_gauges_anew(tmp_path: Path) -> None:
    with MetricMemory(tmp_path / "metrics", list_writers(1)) as memory:
        first = writers.start(FRONTEND, memory.directory)
        writers.kill(first)
        values = writers.read(memory.directory)
        assert values.get("sensorium:http_requests_in_flight") == 1
        clear_gauges("frontend-0", memory.directory)
        values = writers.read(memory.directory)
        assert values.get("sensorium:http_requests_in_flight") == 0
        assert "sensorium:http_requests_in_flight" in values.names
        assert count_aborts(memory.directory) == 1
        size = get_path(memory.directory, "counter", "frontend-0").stat().st_size
        second = writers.start(FRONTEND, memory.directory)
        assert count_aborts(memory.directory) == 2
        assert writers.read(memory.directory).get("sensorium:http_requests_in_flight") == 1
        writers.end(second)
        assert get_path(memory.directory, "counter", "frontend-0").stat().st_size == size


def test_gauges_of_a_process_that_never_wrote_are_no_obstacle(tmp_path: Path) -> None:
    with MetricMemory(tmp_path / "metrics", list_writers(1)) as memory:
        clear_gauges("core", memory.directory)
    clear_gauges("core", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics"}


def test_a_directory_that_can_not_be_made_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):  # noqa: PT011
        MetricMemory(tmp_path / "missing" / "metrics", list_writers(1))
    assert len(os.listdir("/proc/self/fd")) == before
