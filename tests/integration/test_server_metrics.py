"""After a mixed run the metrics are what was done, with one frontend and with two."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.counting import CHAT, Tally
from tests.integration.media_hosts import MediaServer, reply
from tests.support.clients import (
    MODEL,
    Answer,
    Message,
    ask,
    chat,
    make_conversations,
    make_image_part,
    make_png,
    make_url_part,
    stream_chat,
)
from tests.support.server import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-shared")
SERIES = Path(__file__).parents[1] / "unit/server/metrics/dashboard_series.txt"
# No two have a media item in common: which of them finds what doesn't depend on who comes first.
CONVERSATIONS = [
    make_conversations(70 + index)[name]
    for index, name in enumerate(("text", "image", "images", "video", "audio", "mixed"))
]
LONG: dict[str, Any] = {"ignore_eos": True, "min_tokens": 1}


@pytest.fixture(params=["omni_server", "shared_server"])
def server(request: pytest.FixtureRequest) -> ServerProcess:
    found: ServerProcess = request.getfixturevalue(request.param)
    return found


class Run:
    """Asks over a new connection each time, and counts."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.tally = Tally()

    def ask(self, messages: list[Message], *, is_streamed: bool = False, **fields: Any) -> Answer:
        with self.server.make_client() as client:
            answer = (stream_chat if is_streamed else chat)(client, messages, **fields)
        self.tally.add_answer(messages, answer)
        return answer

    def ask_all(self, **fields: Any) -> list[Answer]:
        with ThreadPoolExecutor(6) as threads:
            return list(threads.map(lambda messages: self.ask(messages, **fields), CONVERSATIONS))

    def be_refused(self, reason: str, status: int, **body: Any) -> None:
        body = {"messages": ask("Hello"), **body}
        response = self.server.post(CHAT, body)
        assert response.status_code == status, response.text
        self.tally.add_refusal(reason)


def run_mixed(run: Run) -> None:
    cold = run.ask_all()
    assert sum(answer.num_cached_tokens for answer in cold) == 0
    warm = run.ask_all(is_streamed=True, max_tokens=3)
    assert sum(answer.num_cached_tokens for answer in warm) > 0
    run.ask_all(n=2, temperature=1.0, seed=1)
    free = run.ask(CONVERSATIONS[0], max_tokens=24, extra_body=LONG)
    stopped = run.ask(CONVERSATIONS[0], max_tokens=24, stop=free.text[8:10], extra_body=LONG)
    assert (free.choices[0].finish_reason, stopped.choices[0].finish_reason) == ("length", "stop")
    image = CONVERSATIONS[1][0]["content"][0]
    again = run.ask(ask("The same, elsewhere in a prompt:", image))
    assert again.get_hits("encoder") == ["hit"]


def be_refused_in_every_way(run: Run) -> None:
    run.be_refused("bad_request", 400, temperature="hot")
    run.be_refused("bad_request", 400, messages=[])
    run.be_refused("not_found", 404, model="another")
    unknown = {"type": "image_url", "image_url": None, "uuid": "never sent"}
    run.be_refused("missing_media", 409, messages=ask(unknown))


def wait_until_idle(server: ServerProcess) -> None:
    names = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "sensorium:num_requests_preparing",
        "sensorium:http_requests_in_flight",
    )
    wait_until(
        lambda: not any(server.get_metrics()[name] for name in names), "nothing is under way"
    )


def test_metrics_count_what_was_done(server: ServerProcess) -> None:
    server.reset_caches()
    wait_until_idle(server)
    before = server.get_metrics()
    num_lines = len(server.lines)
    run = Run(server)
    run_mixed(run)
    be_refused_in_every_way(run)
    num_frontends = 2 if "--api-server-count" in server.flags else 1

    def find_frontends() -> set[str]:
        return set(re.findall(r"(frontend-\d) .*POST /v1/chat", "".join(server.lines[num_lines:])))

    ends_at = time.monotonic() + 60.0
    while len(find_frontends()) < num_frontends and time.monotonic() < ends_at:
        run.ask(CONVERSATIONS[0], max_tokens=1)  # who takes a connection is the system's choice
    after = server.get_metrics()
    assert run.tally.compare(before, after) == {}
    assert len(find_frontends()) == num_frontends
    assert after["vllm:kv_cache_usage_perc"] == 0
    wait_until_idle(server)


def test_request_whose_client_leaves_is_an_abort(server: ServerProcess) -> None:
    question = ask("Tell me a long story.")
    for _ in range(5):
        wait_until_idle(server)
        before = server.get_metrics()
        num_seen = leave_early(server, question)
        wait_until_idle(server)
        ended = 'vllm:request_success_total{finished_reason="length"}'
        if server.get_metrics()[ended] == before[ended]:
            break  # else this client was slower than the whole story: it leaves another one
    prompt = make_count(server, question)
    after = server.get_metrics()

    def get_change(name: str) -> float:
        return after[name] - before[name]

    assert get_change('vllm:request_success_total{finished_reason="abort"}') == 1
    assert get_change('sensorium:core_requests_total{finished_reason="abort"}') == 1
    assert get_change("vllm:prompt_tokens_total") == 2 * prompt  # one is the one that counts them
    assert num_seen <= get_change("vllm:generation_tokens_total") - 1 < 1500
    assert get_change("vllm:e2e_request_latency_seconds_count") == 1


def leave_early(server: ServerProcess, question: list[Message]) -> int:
    """After a few of very many tokens; how many."""
    num_seen = 0
    with server.make_client() as client:
        stream: Any = client.chat.completions.create(
            model=MODEL,
            messages=question,
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        for chunk in stream:
            num_seen += len(getattr(chunk.choices[0], "token_ids", None) or ())
            if num_seen >= 3:
                break
        stream.close()
    return num_seen


def make_count(server: ServerProcess, messages: list[Message]) -> int:
    """The tokens of a prompt, by an answer of one token."""
    with server.make_client() as client:
        return int(chat(client, messages, max_tokens=1).usage.prompt_tokens)


def test_media_that_is_fetched_or_refused_is_counted(
    server: ServerProcess, media_path: Path
) -> None:
    host = MediaServer()
    host.on("/picture.png", reply(200, make_png(80), Cache_Control="no-store"))
    (media_path / "counted.png").write_bytes(make_png(81))
    before = server.get_metrics()
    for url, status in (
        (f"http://127.0.0.1:{host.port}/picture.png", 200),
        (f"file://{media_path}/counted.png", 200),
        (f"http://127.0.0.1:{host.port}/nothing.png", 422),
    ):
        body = {"messages": ask(make_url_part("image", url)), "max_tokens": 1}
        assert server.post(CHAT, body).status_code == status
    host.close()
    after = server.get_metrics()
    changes = {name: after[name] - before.get(name, 0) for name in after}
    assert changes['sensorium:media_bytes_total{source="http"}'] == len(make_png(80))
    assert changes['sensorium:media_bytes_total{source="file"}'] == len(make_png(81))
    assert changes['sensorium:media_bytes_total{source="data"}'] == 0
    assert changes["sensorium:media_fetches_total"] == 2
    assert changes['sensorium:refused_requests_total{reason="media"}'] == 1
    assert sum(v for k, v in changes.items() if k.startswith("sensorium:media_refusals_total")) == 1


# ---- what is there from the start


def test_dashboards_find_their_series_from_the_start(server: ServerProcess) -> None:
    samples = [
        (sample.name, sample.labels)
        for family in text_string_to_metric_families(server.first_metrics)
        for sample in family.samples
    ]
    lines = [line for line in SERIES.read_text().splitlines() if line and line[0] != "#"]
    assert len(lines) > 50
    for line in lines:
        name, _, rest = line.partition("{")
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        if name.startswith("vllm:"):
            wanted["model_name"] = MODEL
        assert any(own == name and wanted.items() <= labels.items() for own, labels in samples), (
            line
        )


def test_series_of_the_reference_are_there_from_the_start(server: ServerProcess) -> None:
    families = {family.name for family in text_string_to_metric_families(server.first_metrics)}
    for name in (
        *("vllm:mm_cache_queries", "vllm:mm_cache_hits", "vllm:prefix_cache_queries"),
        *("vllm:prefix_cache_hits", "vllm:num_requests_running", "vllm:num_requests_waiting"),
        *("vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds"),
        *("vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds"),
        *("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success"),
        *("vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds"),
        *("vllm:request_decode_time_seconds", "vllm:request_prompt_tokens"),
        *("vllm:request_generation_tokens", "vllm:request_max_num_generation_tokens"),
        *("vllm:websocket_connections_active", "sensorium:stage_seconds"),
        *("sensorium:num_requests_preparing", "sensorium:cache_queries", "sensorium:cache_hits"),
        *("sensorium:encoder_cache_used_embeds", "sensorium:cache_resends"),
        *("sensorium:cache_evictions", "sensorium:media_bytes", "sensorium:refused_requests"),
    ):
        assert name in families, name
    stages = set(re.findall(r'stage_seconds_count{.*stage="(\w+)"', server.first_metrics))
    wanted = {"fetch", "hash", "decode", "process", "transfer", "queue", "encode", "prefill"}
    assert wanted <= stages


def test_a_busy_server_logs_its_hit_rates(shared_server: ServerProcess) -> None:
    question = ask(make_image_part(90), "What is this?")
    num_lines = len(shared_server.lines)

    def is_said(test: Callable[[str], bool]) -> bool:
        with shared_server.make_client() as client:
            chat(client, question, max_tokens=1)
        return any(map(test, shared_server.lines[num_lines:]))

    wait_until(lambda: is_said(lambda line: "MM cache hit rate:" in line), "the line is there")
    # The first of these looks may have been a miss; the next line has hits only.
    wait_until(lambda: is_said(lambda line: "MM cache hit rate: 100.0%" in line), "all is known")
