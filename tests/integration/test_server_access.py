"""A server that guards itself: keys, origins, sizes, numbers; and what it logs, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import AuthenticationError, RateLimitError

from sensorium.server.http.welcome import WELCOME_PATHS
from tests.support.clients import MODEL, ask, chat, make_video_part
from tests.support.server import ServerProcess, get_command, serve
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.integration.browsing import Browser

pytestmark = pytest.mark.xdist_group("server-access")
KEYS = ("first-key", "second-key")
KEY = {"Authorization": f"Bearer {KEYS[0]}"}
ORIGIN = "https://page.example"
LIMIT = 3
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(
    tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """It runs one request at a time, the one with the lowest priority first."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("".join(f"{key}\n" for key in KEYS))
    flags = (
        *("--served-model-name", MODEL, "another-name", "--max-model-len", "4096"),
        *("--api-key-file", str(path), "--protect-metrics"),
        *("--allowed-origins", ORIGIN, "--max-body-mb", "1"),
        *("--max-concurrent-requests", str(LIMIT), "--max-num-seqs", "1"),
        *("--scheduling-policy", "priority", "--trust-request-chat-template"),
        *("--log-format", "json"),
    )
    with serve(tiny_model("qwen2_5_vl"), *flags) as server:
        yield server
    assert not any(key in server.output for key in KEYS)


def get_metrics(server: ServerProcess) -> dict[str, float]:
    return server.get_metrics(headers=KEY)


@contextmanager
def run_long(server: ServerProcess) -> Iterator[None]:
    """Keep the only seat busy with a request as long as this is open."""
    body = {
        "messages": ask("Count to a million."),
        "max_tokens": 3900,
        "ignore_eos": True,
        "stream": True,
    }
    with (
        httpx.Client(timeout=120.0) as client,
        client.stream("POST", server.get_url(CHAT), json=body, headers=KEY) as response,
    ):
        lines = response.iter_lines()  # kept: its end would close the connection
        next(lines)
        yield


def post_short(server: ServerProcess, **fields: Any) -> httpx.Response:
    body = {"messages": ask("Hello"), "max_tokens": 1, **fields}
    return server.post(CHAT, body, headers=KEY)


def get_load(server: ServerProcess) -> int:
    return int(server.get("/load", headers=KEY).json()["server_load"])


def test_a_key_is_needed_for_all_routes_but_health(server: ServerProcess) -> None:
    for path in ("/health", "/ping", "/version", *WELCOME_PATHS):
        assert server.get(path).status_code == 200
    for path in ("/v1/models", "/metrics", "/load", "/nowhere"):
        refused = server.get(path)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
    assert server.post("/reset_mm_cache").status_code == 401
    with server.make_client(api_key="wrong") as client, pytest.raises(AuthenticationError):
        client.models.list()
    for key in KEYS:
        with server.make_client(api_key=key) as client:
            assert [model.id for model in client.models.list()] == [MODEL, "another-name"]
            answer: Any = client.chat.completions.create(
                model="another-name", messages=ask("Hello"), max_tokens=1
            )
            assert answer.model == "another-name"
    assert server.get("/metrics", headers=KEY).status_code == 200


@pytest.mark.slow
def test_a_key_of_the_environment_is_seen_in_no_process_but_the_first(
    tiny_model: Callable[[str], str],
) -> None:
    flags = ("--mm-processor-pool-size", "1", "--max-model-len", "1024")
    with serve(tiny_model("llava"), *flags, is_cold=True, SENSORIUM_API_KEY=KEYS[0]) as server:
        assert server.get("/v1/models").status_code == 401
        assert server.get("/v1/models", headers=KEY).status_code == 200
        first, *others = server.get_process_ids()
        assert len(others) >= 3  # the core, a frontend, a process for media
        for pid in (first, *others):
            assert KEYS[0] not in get_command(pid)
        for pid in others:
            assert KEYS[0].encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_the_welcome_page_asks_for_the_key(server: ServerProcess, browser: Browser) -> None:
    browser.open(server)
    browser.allow_status(401)
    browser.wait_for("#key-row")
    assert browser.find("#notice").text == "This server needs an API key."
    browser.ask("Hello")
    assert browser.get_texts(".failure") == ["This server needs an API key."]
    browser.find("#key").send_keys("wrong\n")  # and the question, which came back, is sent
    browser.wait_for_answer(2)
    assert browser.get_texts(".failure")[1] == "This is not the server's API key."
    browser.find("#key").clear()
    browser.find("#key").send_keys(f"{KEYS[1]}\n")
    browser.wait_for_answer(3)
    assert len(browser.get_texts(".failure")) == 2
    assert browser.get_texts(".trace")
    # By another request than the one that was answered.
    wait_until(
        lambda: [browser.find(name).text for name in ("#model", "#notice")] == [MODEL, ""],
        "the page knows the model, and complains no more",
    )


def test_pages_of_an_allowed_origin_may_send_requests(server: ServerProcess) -> None:
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    preflight["Access-Control-Request-Headers"] = "authorization, content-type"
    allowed = httpx.options(server.get_url(CHAT), headers=preflight, timeout=240.0)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    answer = server.get("/v1/models", headers={**KEY, "Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    refused = server.get("/v1/models", headers={"Origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN  # a page can read the error
    stranger = server.get("/v1/models", headers={**KEY, "Origin": "https://other.example"})
    assert "access-control-allow-origin" not in stranger.headers


@pytest.mark.parametrize("is_chunked", [False, True])
def test_large_bodies_are_refused(server: ServerProcess, is_chunked: bool) -> None:
    body = json.dumps({"messages": ask("x" * 2**20)}).encode()
    pieces = (body[start : start + 65536] for start in range(0, len(body), 65536))
    content = pieces if is_chunked else body
    before = get_metrics(server)
    headers = {**KEY, "content-type": "application/json"}
    response = httpx.post(server.get_url(CHAT), content=content, headers=headers, timeout=240.0)
    assert response.status_code == 413
    assert str(2**20) in response.json()["error"]["message"]
    name = 'sensorium:refused_requests_total{reason="body_too_large"}'
    assert get_metrics(server)[name] - before[name] == 1


def test_requests_above_the_limit_are_refused_with_retry_after(server: ServerProcess) -> None:
    name = 'sensorium:refused_requests_total{reason="capacity"}'
    before = get_metrics(server)[name]
    with ThreadPoolExecutor() as threads:
        with run_long(server):
            waiting = [threads.submit(post_short, server) for _ in range(LIMIT - 1)]
            wait_until(lambda: get_load(server) == LIMIT, "all are in")
            assert get_metrics(server)["sensorium:http_requests_in_flight"] == LIMIT
            refused = post_short(server)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            with server.make_client(api_key=KEYS[0]) as client:
                with pytest.raises(RateLimitError):
                    chat(client, ask("Hello"))
                assert client.models.list().data  # others are served
        assert [future.result().status_code for future in waiting] == [200] * (LIMIT - 1)
    wait_until(lambda: get_load(server) == 0, "all have left")
    assert get_metrics(server)[name] - before == 2
    assert post_short(server).status_code == 200


def test_a_lower_priority_value_runs_first(server: ServerProcess) -> None:
    def count_waiting() -> float:
        return get_metrics(server)["vllm:num_requests_waiting"]

    ended: list[int] = []

    def post(priority: int, max_tokens: int) -> None:
        assert post_short(server, priority=priority, max_tokens=max_tokens).status_code == 200
        ended.append(priority)

    with ThreadPoolExecutor() as threads:
        with run_long(server):
            # So long that the one that runs first also ends first.
            late = threads.submit(post, 5, 400)
            wait_until(lambda: count_waiting() == 1, "one waits")
            early = threads.submit(post, -5, 1)
            wait_until(lambda: count_waiting() == 2 or early.done(), "the other waits or runs")
        late.result()
        early.result()
    assert ended == [-5, 5]


def test_trusted_requests_may_have_their_own_template(server: ServerProcess) -> None:
    with server.make_client(api_key=KEYS[0]) as client:
        template = "{{ greeting }} {{ messages[0]['content'][0]['text'] }}"
        extra = {"chat_template": template, "chat_template_kwargs": {"greeting": "Good day"}}
        answer = chat(client, ask("Hello"), extra_body=extra)
        tokens = client.completions.create(
            model=MODEL,
            prompt="Good day Hello",
            max_tokens=1,
            extra_body={"return_token_ids": True},
        )
        expected = tokens.choices[0].prompt_token_ids  # type: ignore[attr-defined]
    # With or without what the tokenizer puts before a plain text.
    assert list(answer.prompt_token_ids) == expected[-len(answer.prompt_token_ids) :]
    assert len(expected) - len(answer.prompt_token_ids) in (0, 1)


def test_the_log_consists_of_json_lines(server: ServerProcess) -> None:
    # Libraries of this process and of those that process media have something to say of videos.
    video = ask(make_video_part(), "Hello")
    assert post_short(server, hat_size=7, messages=video).status_code == 200
    server.wait_for_output("hat_size")
    server.wait_for_output("MM cache hit rate")
    entries = [json.loads(line) for line in server.lines]
    assert {"parent", "core", "frontend-0"} <= {entry["process"] for entry in entries}
    for entry in entries:
        assert {"time", "level", "process", "process_id", "logger", "message"} <= entry.keys()
    (engine,) = [entry["engine"] for entry in entries if "engine" in entry]
    assert {"model", "family", "device", "KV cache"} <= engine.keys()
    (url,) = [entry["url"] for entry in entries if "url" in entry]
    assert url == server.url
    assert any(CHAT in entry["message"] for entry in entries)  # also the access log
    assert not any(key in server.output for key in KEYS)
