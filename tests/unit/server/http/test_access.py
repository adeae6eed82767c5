"""Who is let in, how many at once, and under which id."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sensorium.server.http.middleware import RequestCount
from tests.support.waiting import wait_until
from tests.unit.server.standing_in import RunningServer, ScriptedEngine, serve

OPEN = ("/health", "/ping", "/version")
CLOSED = ("/v1/models", "/load", "/docs", "/openapi.json", "/nothing")


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    with serve(
        api_key=("other", "secret", "schlüssel", "voilà"), allowed_origins=("http://a.example",)
    ) as running:
        yield running


def get(running: RunningServer, path: str, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"authorization": key}
    return running.get(path, headers=headers)


def test_only_some_routes_are_open(locked: RunningServer) -> None:
    assert {path: get(locked, path).status_code for path in (*OPEN, "/metrics")} == dict.fromkeys(
        (*OPEN, "/metrics"), 200
    )
    for path in CLOSED:
        response = get(locked, path)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["x-request-id"]
    assert locked.chat().status_code == 401
    assert locked.engine.calls == []


@pytest.mark.parametrize(
    "key", ["secret", "Bearer", "Basic secret", "Bearer secre", "Bearer secretx"]
)
def test_a_wrong_key_is_refused(locked: RunningServer, key: str) -> None:
    assert get(locked, "/v1/models", key).status_code == 401


def test_a_key_may_have_any_characters(locked: RunningServer) -> None:
    # The last byte of "à" in UTF-8 is a no-break space in latin-1.
    keys = {"schlüssel": 200, "voilà": 200, "schlussel": 401, "schlüssel€": 401, "voil\u00c3": 401}
    for key, status in keys.items():
        headers = {b"authorization": f"Bearer {key}".encode()}
        assert locked.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("key", ["Bearer secret", "bearer other", "Bearer  secret"])
def test_any_of_the_keys_opens_all_routes(locked: RunningServer, key: str) -> None:
    statuses = [get(locked, path, key).status_code for path in CLOSED]
    assert statuses == [200, 200, 200, 200, 404]


def test_metrics_can_be_protected() -> None:
    with serve(api_key=("secret",), protect_metrics=True) as running:
        assert get(running, "/metrics").status_code == 401
        assert get(running, "/metrics", "Bearer secret").text == "metric 1\n"
        assert get(running, "/health").status_code == 200


def test_a_browser_may_ask_before_it_has_the_key(locked: RunningServer) -> None:
    headers = {
        "origin": "http://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    response = locked.ask("OPTIONS", "/v1/chat/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "http://a.example"
    headers["origin"] = "http://b.example"
    stranger = locked.ask("OPTIONS", "/v1/chat/completions", headers=headers)
    assert "access-control-allow-origin" not in stranger.headers


def test_errors_can_be_read_across_origins(locked: RunningServer) -> None:
    response = locked.get("/v1/models", headers={"origin": "http://a.example"})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "http://a.example"
    exposed = response.headers["access-control-expose-headers"].split(", ")
    assert exposed == ["x-request-id", "x-sensorium-warning"]


def test_without_origins_there_is_no_cors(server: RunningServer) -> None:
    response = server.get("/ping", headers={"origin": "http://a.example"})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("given", ["mine-1", "a b", "x" * 128])
def test_a_valid_request_id_is_returned(server: RunningServer, given: str) -> None:
    for path in ("/ping", "/nothing"):
        response = server.get(path, headers={"X-Request-Id": given})
        assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "é"])
def test_an_invalid_request_id_is_replaced(server: RunningServer, given: str) -> None:
    headers = {b"x-request-id": given.encode()}
    first, second = (server.get("/ping", headers=headers).headers["x-request-id"] for _ in range(2))
    assert len({first, second, given}) == 3


def test_a_streamed_answer_carries_the_id(server: RunningServer) -> None:
    with server.client(headers={"X-Request-Id": "mine"}) as client:
        response = client.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["content-type"].startswith("text/event-stream")


def test_the_requests_of_all_frontends_count() -> None:
    numbers = [0.0, 0.0]
    first, second = RequestCount(numbers, 0), RequestCount(numbers, 1)
    first.add(1)
    second.add(1)
    second.add(1)
    assert (first.total, second.total) == (3, 3)
    second.add(-1)
    assert (first.total, numbers) == (2, [1.0, 1.0])


@pytest.mark.parametrize("limit", [1, 3])
def test_requests_over_the_limit_are_refused_with_retry_after(limit: int) -> None:
    gate = threading.Event()

    async def wait(_: Any) -> None:
        while not gate.is_set():
            await asyncio.sleep(0.01)

    engine = ScriptedEngine(prepare=wait)
    answers: list[int] = []
    with serve(engine, max_concurrent_requests=limit) as running:
        threads = [
            threading.Thread(target=lambda: answers.append(running.chat().status_code))
            for _ in range(limit)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: engine.num_open == limit, "the requests do not start")
        assert get(running, "/load").json() == {"server_load": limit}
        refused = running.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert running.metrics.refusals == {"capacity": 1}
        assert get(running, "/v1/models").status_code == 200
        gate.set()
        for thread in threads:
            thread.join(60)
        assert answers == [200] * limit
        assert running.complete().status_code == 200
        assert get(running, "/load").json() == {"server_load": 0}
