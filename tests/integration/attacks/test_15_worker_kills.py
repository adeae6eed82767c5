"""Row 15: while the processes for media are killed again and again, nothing is a client's fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from attacks.neighbours import PICTURE, make_new_picture, make_picture_part
from tests.support.server import ServerProcess, kill
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("attack_15")
PATIENCE_S = 480.0  # only against hangs


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess("sensorium-mini", "--mm-processor-pool-size", "2")
    try:
        server.wait_until_ready()
        wait_until(
            lambda: server.get_metrics()["sensorium:pool_workers"] >= 1,
            "a process for media is ready",
            timeout_s=PATIENCE_S,
        )
        yield server
    finally:
        server.stop()


def ask(server: ServerProcess, picture: bytes | None) -> httpx.Response:
    parts = [] if picture is None else [make_picture_part(picture)]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}
    body = {"messages": [message], "temperature": 0, "max_tokens": 8}
    return httpx.post(server.get_url("/v1/chat/completions"), json=body, timeout=PATIENCE_S)


@contextmanager
def killing(server: ServerProcess) -> Iterator[None]:
    """No worker of the pool lives for long."""
    is_over = threading.Event()

    def run() -> None:
        ends_at = time.monotonic() + PATIENCE_S
        while not is_over.wait(0.02) and time.monotonic() < ends_at:
            for process_id in server.find_children("pool.worker"):
                kill(process_id)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.slow  # in short: tests/integration/test_server_faults.py, where one worker is killed
def test_killed_workers_cause_no_client_errors(server: ServerProcess) -> None:
    assert ask(server, PICTURE).status_code == 200
    refusals: list[httpx.Response] = []
    deadline = time.monotonic() + PATIENCE_S
    with killing(server):
        while len(refusals) < 3:
            assert time.monotonic() < deadline
            response = ask(server, make_new_picture())
            assert response.status_code in (200, 503), response.text
            if response.status_code == 503:
                refusals.append(response)
            assert ask(server, None).status_code == 200  # text needs no worker
            assert ask(server, PICTURE).status_code == 200  # nor does a picture that is cached
    assert all(int(response.headers["retry-after"]) >= 1 for response in refusals)
    texts = [response.json()["error"]["message"] for response in refusals]
    assert any("media can't be processed" in text or "ended from outside" in text for text in texts)
    while (response := ask(server, make_new_picture())).status_code != 200:
        assert response.status_code == 503, response.text
        assert time.monotonic() < deadline
        time.sleep(float(response.headers["retry-after"]))
    assert len(response.json()["choices"]) == 1
