"""Bodies and heads that drip take no place of others, and are ended by their deadlines."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from attacks.neighbours import Neighbours
from attacks.slow_bodies import FLAGS, NUM_BODIES, NUM_HEADS, attack
from tests.support.server import POOL, ServerProcess, serve

# In short: test_body_intake.py and test_slow_heads.py in tests/unit/server/http.
pytestmark = [pytest.mark.xdist_group("attack-slow-bodies"), pytest.mark.slow]

BOUND_S = 60.0
DEADLINES = ("--head-timeout", "3", "--body-timeout", "6")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve("sensorium-mini", *FLAGS, *DEADLINES, *POOL) as server:
        yield server


def read_to_the_end(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while piece := connection.recv(65536):
            answer += piece
    except ConnectionError:  # closed while our last byte was under way
        pass
    return answer


def test_slow_bodies_are_ended_and_neighbours_are_answered(server: ServerProcess) -> None:
    neighbours = Neighbours(server.get_url())
    began = time.monotonic()
    with attack(server.get_url()) as connections:
        answers = neighbours.ask_while(lambda: time.monotonic() - began < 10, pause_s=0.5)
        assert neighbours.list_faults(answers) == []
        assert max(answer.seconds for answer in answers) < BOUND_S
        # The server ends each of them: reading to the end would time out if it did not.
        received = [read_to_the_end(connection) for connection in connections]
    bodies, heads = received[:NUM_BODIES], received[NUM_BODIES : NUM_BODIES + NUM_HEADS]
    assert {answer[:12] for answer in bodies if answer} == {b"HTTP/1.1 408"}
    assert b"came too slowly" in bodies[0]
    assert {answer[:12] for answer in heads if answer} == {b"HTTP/1.1 408"}
    assert set(received[NUM_BODIES + NUM_HEADS :]) == {b""}  # they asked nothing
    assert server.get("/load").json() == {"server_load": 0}


def test_an_upload_in_many_pieces_is_accepted(server: ServerProcess) -> None:
    body = b'{"prompt": "' + b"a " * 2000 + b'", "max_tokens": 1}'
    pieces = (body[start : start + 16] for start in range(0, len(body), 16))
    headers = {"content-type": "application/json"}
    url = server.get_url("/v1/completions")
    assert httpx.post(url, content=pieces, headers=headers, timeout=120).status_code == 200
