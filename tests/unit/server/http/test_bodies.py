"""Bodies that are wrong, large or slow."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support.waiting import wait_until
from tests.unit.server.standing_in import RunningServer, ScriptedEngine, serve

PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
HEAD = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"  ", "empty"),
        (b'{"messages": [}', "byte 14"),
        (b'{"temperature": NaN}', "byte 16"),
        (b'{"temperature": 1e999}', "out of range"),
        (b'{"messages"', "truncated"),
        (b'{"user": "\xff\xfe"}', "UTF-8: byte 10 is 0xff"),
        (b'{"user": ' + b"[" * 50_000, "nested too deeply"),
        (b'{"user": ' + b"[" * 500_000, "nested too deeply"),
        (b"[1]", "must be a JSON object, not a list"),
        (b"null", "must be a JSON object"),
        (b"1.5", "must be a JSON object, not a number"),
        (b'"text"', "must be a JSON object, not a string"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_with_the_place(
    server: RunningServer, body: bytes, words: str
) -> None:
    response = server.post(PATH, content=body, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_json")
    assert words in error["message"]


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x"])
def test_another_content_type_is_refused(server: RunningServer, kind: str) -> None:
    response = server.post(PATH, content=b"{}", headers={"content-type": kind})
    assert response.status_code == 400
    assert kind.partition(";")[0] in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/x+json"])
def test_other_content_types_of_json_are_accepted(server: RunningServer, kind: str) -> None:
    body = json.dumps({"messages": HI}).encode()
    response = server.post(PATH, content=body, headers={"content-type": kind})
    assert response.status_code == 200


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    with serve(max_body_mb=1) as running:
        yield running


def test_a_length_over_the_limit_is_refused_before_the_body_comes(small: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", small.port), timeout=60) as connection:
        head = HEAD + "content-length: 9999999999\r\n\r\n"
        connection.sendall(head.encode())
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413")
    assert small.metrics.refusals["body_too_large"] > 0


def test_a_body_without_a_length_is_refused_when_it_exceeds_the_limit(small: RunningServer) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 2**16

    response = small.post(PATH, content=pieces(), headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_a_body_without_a_length_is_taken_within_the_limit(small: RunningServer) -> None:
    text = json.dumps({"messages": HI}).encode()
    response = small.post(PATH, content=iter([text[:9], text[9:]]), headers=JSON)
    assert response.status_code == 200


def test_the_limit_itself_is_allowed(small: RunningServer) -> None:
    body = json.dumps({"messages": HI}).encode().ljust(2**20)
    assert small.post(PATH, content=body, headers=JSON).status_code == 200
    assert small.post(PATH, content=body + b" ", headers=JSON).status_code == 413


def test_a_stream_continues_while_a_large_body_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The large body is held in its parser until the stream has ended.

    Were it parsed on the event loop, the stream could not end.
    """
    from sensorium.server.http.bodies import reading as body_module

    is_parsing, may_go_on = threading.Event(), threading.Event()
    decode = body_module.decode_json

    def decode_slowly(text: bytearray) -> object:
        if len(text) > 10_000_000:
            is_parsing.set()
            assert may_go_on.wait(120)
        return decode(text)

    monkeypatch.setattr(body_module, "decode_json", decode_slowly)
    url = "data:image/png;base64," + base64.b64encode(os.urandom(15_000_000)).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    large = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
    answers: list[int] = []
    engine = ScriptedEngine()
    with serve(engine) as running:

        def send_large() -> None:
            response = running.post(PATH, content=large, headers=JSON)
            answers.append(response.status_code)

        thread = threading.Thread(target=send_large)
        thread.start()
        try:
            assert is_parsing.wait(120)
            streamed = running.chat(stream=True)
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert answers == []
        finally:
            may_go_on.set()
            thread.join(120)
        assert answers == [200]
        wait_until(lambda: engine.num_open == 0, "requests remain")
