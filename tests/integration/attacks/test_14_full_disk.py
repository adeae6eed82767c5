"""Row 14: a directory for temporary files that is full costs nothing but lines of a log there."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from attacks.full_disk import CannotMountError, attack, get_free_bytes, small_disk
from attacks.neighbours import Neighbours
from tests.support.nursery import NurseryProcess, get_nursery
from tests.support.server import (
    COMMAND,
    POOL,
    START_TIMEOUT_S,
    ServerProcess,
    get_descendants,
    kill,
    serve,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("attack-14")

MODEL = "sensorium-mini"
BOUND_S = 60.0


@pytest.fixture
def disk() -> Iterator[Path]:
    """A disk of 1 MB, under a path that is short enough for the server's sockets."""
    with tempfile.TemporaryDirectory(prefix="disk-", dir="/tmp") as folder, ExitStack() as stack:
        try:
            mounted = stack.enter_context(small_disk(Path(folder) / "d"))
        except CannotMountError as error:
            pytest.skip(f"a small disk can't be mounted here: {error}")
        yield mounted


def get_counts(server: ServerProcess) -> tuple[float, float]:
    metrics = server.get_metrics()
    ended = sum(
        value for name, value in metrics.items() if name.startswith("vllm:request_success_total")
    )
    return ended, metrics["vllm:generation_tokens_total"]


def is_answered(neighbours: Neighbours) -> bool:
    """Each frontend learns of a core by itself: one may still refuse what another answers."""
    answers = [neighbours.ask("text") for _ in range(4)]
    return not neighbours.list_faults(answers)


def test_a_full_disk_fails_no_request_and_ends_no_process(disk: Path) -> None:
    with serve(MODEL, "--api-server-count", "2", *POOL, TMPDIR=str(disk)) as server:
        assert list(disk.glob("sensorium-*")), "the server has its directory elsewhere"
        with attack(disk):
            assert get_free_bytes(disk) == 0
            neighbours = Neighbours(server.get_url())
            processes = set(server.get_process_ids())
            num_ended, num_tokens = get_counts(server)
            answers = neighbours.ask_while(lambda: False, min_rounds=4)
            assert neighbours.list_faults(answers) == []
            assert max(answer.seconds for answer in answers) < BOUND_S
            # A new series of each kind also needs room of its own.
            assert server.get("/v1/models/none").status_code == 404
            assert set(server.get_process_ids()) >= processes
            assert get_free_bytes(disk) == 0
            ended, tokens = get_counts(server)
            assert ended - num_ended == len(answers)
            assert tokens > num_tokens
            metrics = server.get_metrics()
            assert metrics['sensorium:process_restarts_total{kind="core"}'] == 0
            assert metrics['sensorium:process_restarts_total{kind="frontend"}'] == 0

            # Even a process that has to be started again finds what it needs.
            (core,) = server.find_children("core_main")
            kill(core)
            wait_until(lambda: is_answered(neighbours), "the core is back", START_TIMEOUT_S)
            assert server.find_children("core_main") != [core]
            assert get_counts(server)[0] >= ended + 1


@contextmanager
def serve_with_full_log(log: Path) -> Iterator[str]:
    """Yield the address of a server that logs to a file on a disk that is soon full."""
    words = ["serve", MODEL, "--port", "0"]
    with log.open("w") as file:
        output = file.fileno()
        process = get_nursery().start(COMMAND, words, env=os.environ, stdout=output)
    try:
        yield _wait_for_address(process, log)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        for pid in [*reversed(get_descendants(process.pid)), process.pid]:
            kill(pid)
        process.wait(60)


def _wait_for_address(process: NurseryProcess, log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"Sensorium is ready: (http://[\d.:]+)", log.read_text())
        if found is not None:
            return found.group(1)
        time.sleep(0.1)
    raise AssertionError(f"the server is not ready:\n{log.read_text()}")


def test_a_log_on_a_full_disk_loses_only_lines(disk: Path) -> None:
    log = disk / "log"
    with serve_with_full_log(log) as url, attack(disk):
        size = log.stat().st_size
        neighbours = Neighbours(url)
        answers = neighbours.ask_while(lambda: False, min_rounds=3)
        assert neighbours.list_faults(answers) == []
        assert httpx.get(url + "/health", timeout=60).status_code == 200
        assert log.stat().st_size - size < 4096  # at most the rest of a block
