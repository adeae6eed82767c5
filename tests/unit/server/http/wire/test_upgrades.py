"""An upgrade that the server does not know is ignored: its request is answered in HTTP/1.1."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from sensorium.server.http.wire.http_protocol import make_http_protocol
from tests.unit.server.http.wire.test_handshakes import PATIENT, open_to, read_to_the_end
from tests.unit.server.standing_in import RunningServer, serve

# What `curl --http2` and Java's HttpClient send with their first request.
HTTP2 = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQ"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serve(http=PATIENT) as running:
        yield running


def ask(
    server: RunningServer, bodies: list[bytes], headers: dict[str, str], *, is_chunked: bool
) -> list[str]:
    """Return the texts of completions, which are asked for one after another on one connection."""
    texts = []
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.connect()
        first = connection.sock
        for body in bodies:
            parts = (body[i : i + 50_000] for i in range(0, len(body), 50_000))
            connection.request(
                *("POST", "/v1/completions"),
                body=parts if is_chunked else body,
                headers=JSON | headers,
                encode_chunked=is_chunked,
            )
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert response.status == 200, answer
            texts.append(answer["choices"][0]["text"])
        assert connection.sock is first
    return texts


@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize(
    "headers",
    [
        pytest.param(HTTP2, id="h2c"),
        pytest.param({"connection": "upgrade", "upgrade": "TLS/1.0, other"}, id="several"),
        pytest.param(HTTP2 | {"Expect": "100-continue"}, id="expected"),
    ],
)
def test_a_body_comes_whole_and_the_connection_stays(
    server: RunningServer, headers: dict[str, str], is_chunked: bool
) -> None:
    if is_chunked:
        headers = headers | {"Transfer-Encoding": "chunked"}
    prompts = ["hi", "x" * 3_000_000, "ho"]
    before = len(server.engine.calls)
    bodies = [json.dumps({"prompt": prompt}).encode() for prompt in prompts]
    texts = ask(server, bodies, headers, is_chunked=is_chunked)
    assert texts == ["Hello wörld"] * 3
    assert [prompt["prompt"] for prompt, _ in server.engine.calls[before:]] == prompts


def test_requests_with_and_without_one_are_answered_in_turn(server: RunningServer) -> None:
    wishes = "".join(f"{name}: {value}\r\n" for name, value in HTTP2.items())
    with_one = f"GET /ping?a=%20b HTTP/1.1\r\nHost: localhost\r\n{wishes}\r\n".encode()
    without = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = without.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with open_to(server, (with_one * 60 + without) * 3 + last) as connection:
        answer = read_to_the_end(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == 61 * 3 + 1
    assert answer.count(b"HTTP/1.1") == 61 * 3 + 1


def test_a_head_comes_byte_by_byte(server: RunningServer) -> None:
    wishes = "".join(f"{name}: {value}\r\n" for name, value in (HTTP2 | JSON).items())
    body = '{"prompt": "slow"}'
    request = (
        f"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\n{wishes}"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    with open_to(server, b"") as connection:
        connection.setsockopt(6, 1, 1)  # TCP_NODELAY
        for letter in request.encode():
            connection.send(bytes([letter]))
        assert b"200 OK" in read_to_the_end(connection)


def test_the_head_of_an_upgrade_is_limited_like_others() -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n"
    lines = b"x-long: " + b"a" * 70_000 + b"\r\n"
    soon = make_http_protocol(head_timeout_s=0.3, max_connections=None, stream_timeout_s=0.0)
    with serve(http=soon) as running:
        with open_to(running, head + lines) as connection:
            assert read_to_the_end(connection).startswith(b"HTTP/1.1 431")
        with open_to(running, head) as connection:
            assert read_to_the_end(connection).startswith(b"HTTP/1.1 408")
