"""Clients that send very small pieces without end: neighbours are answered, and nothing is left."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import httpx
import pytest

from attacks.neighbours import Neighbours
from attacks.small_pieces import FLAGS, KINDS, attack, open_connection
from tests.support.server import SHARED_SERVERS
from tests.support.waiting import wait_until

# In short: test_turns.py in tests/unit/server/http/wire, test_small_frames.py in realtime.
pytestmark = [pytest.mark.xdist_group("attack-small-pieces"), pytest.mark.slow]
NUM_BYTES = 2**20  # of each kind of pieces: many times what a connection may have at once


def flood(url: str, kind: str) -> bytes:
    """Send small pieces of this kind, and return what the server says until it hangs up."""
    _, _, pieces = KINDS[kind]
    with open_connection(url, kind) as connection:
        connection.settimeout(240.0)

        def send() -> None:
            with suppress(OSError):
                for _ in range(NUM_BYTES // len(pieces)):
                    connection.sendall(pieces)

        thread = threading.Thread(target=send)
        thread.start()
        received = b""
        with suppress(ConnectionError):
            while piece := connection.recv(65536):
                received += piece
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        thread.join()
    return received


def test_small_pieces_leave_nothing_and_neighbours_are_answered() -> None:
    with SHARED_SERVERS.use("sensorium-mini", *FLAGS) as server:
        url = server.get_url()
        neighbours = Neighbours(url)
        with attack(url):
            answers = neighbours.ask_while(lambda: False, min_rounds=5)
        assert neighbours.list_faults(answers) == []
        for kind, code in (("fragments", 1009), ("pings", 1008)):
            assert code.to_bytes(2, "big") in flood(url, kind), kind
        wait_until(lambda: server.get("/load").json() == {"server_load": 0}, "all have ended")


def test_a_body_in_chunks_of_one_byte_is_accepted() -> None:
    body = b'{"prompt": "' + b"a " * 2000 + b'", "max_tokens": 1}'
    pieces = (body[start : start + 1] for start in range(len(body)))
    headers = {"content-type": "application/json"}
    with SHARED_SERVERS.use("sensorium-mini", *FLAGS) as server:
        url = server.get_url("/v1/completions")
        answer = httpx.post(url, content=pieces, headers=headers, timeout=240)
        assert answer.status_code == 200
