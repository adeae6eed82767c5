"""Row 16: many completions in one request, or unread streams, hold up no other request."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from attacks.greedy_stream import attack, is_ended, open_stream
from attacks.neighbours import Neighbours
from tests.support.server import POOL, ServerProcess, serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("attack-16")

MODEL = "sensorium-mini"
STREAM_TIMEOUT_S = 4.0
BOUND_S = 60.0
RUNNING = "vllm:num_requests_running"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--max-num-seqs", "16", "--max-n", "128", "--stream-timeout", str(STREAM_TIMEOUT_S))
    with serve(MODEL, *flags, *POOL) as server:
        yield server


def wait_until_idle(server: ServerProcess) -> None:
    def is_idle() -> bool:
        metrics = server.get_metrics()
        return metrics[RUNNING] == metrics["sensorium:http_requests_in_flight"] == 0

    wait_until(is_idle, "the server has nothing to do", 120)


@pytest.mark.slow  # in short: the test below
def test_neighbours_of_128_unread_completions_are_answered(
    server: ServerProcess,
) -> None:
    neighbours = Neighbours(server.get_url())
    with attack(server.get_url()):
        wait_until(lambda: server.get_metrics()[RUNNING] == 16, "it has all seats", 120)
        answers = neighbours.ask_while(lambda: False, min_rounds=3)
        assert neighbours.list_faults(answers) == []
        assert max(answer.seconds for answer in answers) < BOUND_S
        preempted = server.get_metrics()["vllm:num_preemptions_total"]
        assert preempted <= len(answers)
    wait_until_idle(server)


def test_an_unread_stream_is_ended_with_its_request(server: ServerProcess) -> None:
    aborted = 'vllm:request_success_total{finished_reason="abort"}'
    before = server.get_metrics()[aborted]
    # More than the kernel and the connection's buffer take together.
    with open_stream(server.get_url(), n=64, max_tokens=4000) as connection:
        wait_until(lambda: server.get_metrics()[RUNNING] > 0, "it runs", 120)
        wait_until_idle(server)
        assert server.get_metrics()[aborted] - before == 64
        assert is_ended(connection)
    server.wait_for_output("a client read nothing for 4 s")


def read_slowly(connection: socket.socket, seconds: float) -> int:
    """Read a few kilobytes four times a second, for so long; return their number."""
    num_bytes, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        chunk = connection.recv(2**14)
        assert chunk, "the server has ended a stream that is read"
        num_bytes += len(chunk)
        time.sleep(0.25)
    return num_bytes


@pytest.mark.parametrize("num_timeouts", [1.5, pytest.param(3, marks=pytest.mark.slow)])
def test_a_client_that_reads_slowly_keeps_its_stream(
    server: ServerProcess, num_timeouts: float
) -> None:
    with open_stream(server.get_url(), n=16, max_tokens=4000) as connection:
        num_bytes = read_slowly(connection, num_timeouts * STREAM_TIMEOUT_S)
        assert num_bytes > 2**14
        assert server.get_metrics()["sensorium:http_requests_in_flight"] == 1
    wait_until_idle(server)
