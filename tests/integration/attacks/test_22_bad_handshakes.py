"""Handshakes that can't be parsed are answered at once, and no descriptor is kept for them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from attacks.bad_handshakes import FLAGS, HANDSHAKES
from attacks.slow_bodies import connect
from tests.support.server import SHARED_SERVERS, ServerProcess
from tests.support.waiting import wait_until

# In short: test_handshakes.py in tests/unit/server/http/wire.
pytestmark = pytest.mark.xdist_group("attack-bad-handshakes")
NUM_EACH = 30


def count_files(server: ServerProcess) -> int:
    (frontend,) = server.find_children("frontend_main")
    return len(list(Path(f"/proc/{frontend}/fd").iterdir()))


def read_status(connection: socket.socket) -> int:
    answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(answer.split(b" ")[1])


def test_bad_handshakes_are_answered_and_leave_nothing() -> None:
    # A timer of heads that can't have ended them.
    flags = (*FLAGS, "--head-timeout", "3600", "--api-server-count", "1")
    with SHARED_SERVERS.use("sensorium-mini", *flags) as server:
        before = count_files(server)
        held = [
            (status, connect(server.get_url(), content))
            for status, content in HANDSHAKES.values()
            for _ in range(NUM_EACH)
        ]
        try:
            for _, connection in held:
                connection.settimeout(240.0)
            assert [read_status(connection) for _, connection in held] == [
                status for status, _ in held
            ]
            # The clients keep their ends open.
            wait_until(lambda: count_files(server) <= before, "the server's ends are closed")
        finally:
            for _, connection in held:
                connection.close()
        assert server.get("/ping").status_code == 200
