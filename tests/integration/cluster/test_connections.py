"""Connections that only cost work, and ids that are none: a cluster handles them as a server."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from tests.support.server import ServerProcess, get_command, get_descendants
from tests.support.talking import Talker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("cluster")
WANTED = (
    b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
LINE = b"GET /v1/realtime HTTP/1.1\r\n"
BAD = {
    b"POST" + LINE[3:] + WANTED + b"\r\n": 400,
    LINE + WANTED + b"Content-Length: 5\r\n\r\n": 400,
    LINE + WANTED + b"x-long: " + b"a" * 9000 + b"\r\n\r\n": 431,
    LINE + WANTED + b"x-many: 1\r\n" * 200 + b"\r\n": 431,
}
MASK = bytes(4)
FRAGMENT = b"\x00\x81" + MASK + b" "
PING = b"\x89\x80" + MASK


def connect(server: ServerProcess, content: bytes) -> socket.socket:
    address = urlsplit(server.get_url())
    connection = socket.create_connection((address.hostname, address.port), timeout=240)
    connection.sendall(content)
    return connection


def read_to_the_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def count_files(server: ServerProcess) -> int:
    pids = get_descendants(server.process.pid)
    (proxy,) = [pid for pid in pids if "ProxyActor" in get_command(pid)]
    return len(list(Path(f"/proc/{proxy}/fd").iterdir()))


def test_handshakes_that_can_not_be_parsed_are_answered_and_closed(cluster: ServerProcess) -> None:
    before = count_files(cluster)
    held = [(connect(cluster, content), status) for content, status in [*BAD.items()] * 20]
    try:
        for connection, status in held:
            assert int(read_to_the_end(connection).split(b" ")[1]) == status
        wait_until(lambda: count_files(cluster) < before + len(held) // 2, "they are closed")
    finally:
        for connection, _ in held:
            connection.close()


@pytest.mark.parametrize(
    ("code", "first", "piece"), [(1009, b"\x01\x81" + MASK + b" ", FRAGMENT), (1008, b"", PING)]
)
def test_small_frames_without_end_are_closed_with_their_code(
    cluster: ServerProcess, code: int, first: bytes, piece: bytes
) -> None:
    with Talker(cluster.get_url(), "?intent=transcription") as talker:
        talker.receive()
        with suppress(ConnectionError):
            talker.socket.socket.sendall(first + piece * 30_000)
        with pytest.raises(ConnectionClosed) as caught:
            talker.receive_until("a close frame, which is no message")
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == code
    assert cluster.get("/ping").status_code == 200


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [(b"mine-1", True), (b"a" * 200, False), (b"\xff\xfe", False), (b"a\tb", False)],
)
def test_a_clients_request_id_is_kept_if_it_is_valid(
    cluster: ServerProcess, given: bytes, is_kept: bool
) -> None:
    headers = [(b"x-request-id", given)]
    answer = httpx.get(cluster.get_url("/v1/models"), headers=headers, timeout=240)
    assert answer.status_code == 200
    (request_id,) = answer.headers.get_list("x-request-id")
    assert (request_id == given.decode("latin-1")) is is_kept
    assert 0 < len(request_id) <= 128
