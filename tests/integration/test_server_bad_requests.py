"""What a server can't serve it refuses, naming the field, and the next client notices nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.integration.bad_requests import (
    CHAT,
    GOOD_MESSAGES,
    BadRequest,
    list_bad_requests,
    make_image_url,
    make_messages,
)
from tests.support.server import POOL, ServerProcess, serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-bad-requests")
_FLAGS = (
    *("--max-model-len", "512", "--limit-mm-per-prompt", "image=2"),
    *("--max-body-mb", "4", "--max-n", "4"),
)
_GOOD = [
    {"messages": messages, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    for messages in (GOOD_MESSAGES, make_messages(make_image_url(), make_image_url(1)))
]


@pytest.fixture(scope="module")
def server(tiny_model: Callable[[str], str]) -> Iterator[ServerProcess]:
    with serve(tiny_model("qwen2_5_omni"), *_FLAGS, *POOL) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.get_url(), timeout=240.0) as client:
        yield client


@pytest.fixture(scope="module")
def good_tokens(client: httpx.Client) -> list[list[int]]:
    """Of the good requests, before anything bad has come."""
    return [_generate(client, body) for body in _GOOD]


def _generate(client: httpx.Client, body: object) -> list[int]:
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


@pytest.mark.parametrize("bad", list_bad_requests(), ids=lambda bad: bad.name)
def test_bad_request_is_refused_by_its_field_and_the_next_one_is_served(
    client: httpx.Client, good_tokens: list[list[int]], bad: BadRequest
) -> None:
    answer = client.post(bad.path, content=bad.content, headers=bad.headers)
    assert answer.status_code == bad.status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["param"] == bad.param, error
    assert bad.words in error["message"], error
    assert len(error["message"]) < 1000
    assert _generate(client, _GOOD[0]) == good_tokens[0]


def test_many_bad_requests_leave_nothing_behind(
    server: ServerProcess, client: httpx.Client, good_tokens: list[list[int]]
) -> None:
    before = server.get_metrics()
    for bad in list_bad_requests():
        client.post(bad.path, content=bad.content, headers=bad.headers)
    metrics = server.get_metrics()
    refused = [name for name in metrics if name.startswith("sensorium:refused_requests_total")]
    counts = {name: metrics[name] - before[name] for name in refused}
    assert sum(counts.values()) == len(list_bad_requests())
    assert counts['sensorium:refused_requests_total{reason="internal"}'] == 0
    assert metrics["sensorium:http_requests_in_flight"] == 0
    assert metrics["sensorium:num_requests_preparing"] == 0
    assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
    assert [_generate(client, body) for body in _GOOD] == good_tokens
    assert "Traceback" not in server.output


@pytest.mark.parametrize("has_length", [True, False])
def test_a_body_above_the_limit_is_refused_before_it_has_arrived(
    client: httpx.Client, has_length: bool
) -> None:
    pieces = [b" " * 2**20] * 5
    content = b"".join(pieces) if has_length else iter(pieces)
    headers = {"content-type": "application/json"}
    answer = client.post(CHAT, content=content, headers=headers)
    assert answer.status_code == 413, answer.text
    assert "4194304 bytes" in answer.json()["error"]["message"]


def test_headers_without_an_end_are_cut_off(
    server: ServerProcess, client: httpx.Client, good_tokens: list[list[int]]
) -> None:
    address = urlsplit(server.get_url())
    with socket.create_connection((address.hostname, address.port), timeout=240) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-long: ")
        try:
            for _ in range(1024):
                connection.sendall(b"a" * 2**16)
        except ConnectionError:
            pass  # the server has closed it, and its answer may be lost with what was under way
        else:
            pytest.fail("64 MiB of headers were taken")
    assert _generate(client, _GOOD[0]) == good_tokens[0]


def test_trailers_without_an_end_are_cut_off(server: ServerProcess, client: httpx.Client) -> None:
    address = urlsplit(server.get_url())
    with socket.create_connection((address.hostname, address.port), timeout=240) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        )
        trailers = (b"x-long: " + b"a" * 1000 + b"\r\n") * 64
        try:
            for _ in range(1024):
                connection.sendall(trailers)
        except ConnectionError:
            pass  # the server has closed it
        else:
            pytest.fail("64 MiB of trailers were taken")
    wait_until(lambda: _get_load(client) == 0, "it is given up")


def test_headers_that_are_too_large_are_refused(server: ServerProcess) -> None:
    address = urlsplit(server.get_url())
    with socket.create_connection((address.hostname, address.port), timeout=240) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"a" * 70_000)
        answer = connection.recv(2**16)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in answer


def test_request_that_is_no_http_is_refused(server: ServerProcess) -> None:
    address = urlsplit(server.get_url())
    with socket.create_connection((address.hostname, address.port), timeout=240) as connection:
        connection.sendall(b"\x16\x03\x01 hello?\r\n\r\n")
        answer = connection.recv(2**16)
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_body_that_never_ends_is_given_up_with_its_client(
    server: ServerProcess, client: httpx.Client
) -> None:
    address = urlsplit(server.get_url())
    with socket.create_connection((address.hostname, address.port), timeout=240) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
        )
        wait_until(lambda: _get_load(client) == 1, "the request has arrived")
    wait_until(lambda: _get_load(client) == 0, "it is given up")


def _get_load(client: httpx.Client) -> int:
    load: int = client.get("/load").json()["server_load"]
    return load


def test_more_completions_than_the_server_makes_are_refused(server: ServerProcess) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "n": 5, "max_tokens": 1}
    for path, body, param in (
        ("/v1/chat/completions", chat, "n"),
        ("/v1/completions", {"prompt": "hello", "n": 5, "max_tokens": 1}, "n"),
        (
            "/inference/v1/generate",
            {"token_ids": [1, 2], "sampling_params": {"n": 5, "max_tokens": 1}},
            "sampling_params.n",
        ),
    ):
        response = server.post(path, body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert "at most (--max-n)" in error["message"]
    response = server.post("/v1/chat/completions", {**chat, "n": 4})
    assert len(response.json()["choices"]) == 4
