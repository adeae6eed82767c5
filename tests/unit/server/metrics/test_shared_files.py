"""Metrics lie in memory that needs no disk, and that a restarted process continues with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sensorium.server.metrics.shared_files import clear_gauges, get_path, making_files
from tests.unit.server.metrics import writers

FRONTEND = """
from sensorium.server.metrics.shared_files import write_as
write_as("frontend-0")
from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams
metrics = FrontendMetrics("tiny")
metrics.start_request(arrived=0.0, params=SamplingParams()).on_end(FinishReason.ABORT)
metrics.track_arrival().__enter__()
"""


def count_aborts(directory: Path) -> float:
    values = writers.read(directory)
    return values.get("vllm:request_success_total", finished_reason="abort")


def test_files_are_links_to_memory_that_is_reserved(tmp_path: Path) -> None:
    directory = tmp_path / "metrics"
    with making_files(directory, num_frontends=2):
        paths = list(directory.iterdir())
        assert len(paths) == 3 * 4
        for path in paths:
            assert os.readlink(path).startswith(f"/proc/{os.getpid()}/fd/")
            assert path.stat().st_blocks * 512 >= path.stat().st_size > 0
        assert writers.read(directory).names == frozenset()
    assert not any(path.exists() for path in paths)


def test_a_restarted_process_keeps_counters_and_resets_gauges(tmp_path: Path) -> None:
    directory = tmp_path / "metrics"
    with making_files(directory, num_frontends=1):
        first = writers.start(FRONTEND, directory)
        writers.kill(first)
        values = writers.read(directory)
        assert values.get("sensorium:http_requests_in_flight") == 1
        clear_gauges("frontend-0", directory)
        values = writers.read(directory)
        assert values.get("sensorium:http_requests_in_flight") == 0
        assert "sensorium:http_requests_in_flight" in values.names
        assert count_aborts(directory) == 1
        size = get_path(directory, "counter", "frontend-0").stat().st_size
        second = writers.start(FRONTEND, directory)
        assert count_aborts(directory) == 2
        assert writers.read(directory).get("sensorium:http_requests_in_flight") == 1
        writers.end(second)
        assert get_path(directory, "counter", "frontend-0").stat().st_size == size


def test_clearing_gauges_of_a_process_that_never_wrote_is_harmless(tmp_path: Path) -> None:
    directory = tmp_path / "metrics"
    with making_files(directory, num_frontends=1):
        clear_gauges("core", directory)
    clear_gauges("core", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics"}


def test_a_directory_that_can_not_be_made_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    missing = tmp_path / "missing" / "metrics"
    with pytest.raises(FileNotFoundError), making_files(missing, num_frontends=1):
        pass
    assert len(os.listdir("/proc/self/fd")) == before
