"""Hosts that never answer cost only the requests that name them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from attacks.neighbours import Answer, Neighbours
from attacks.slow_hosts import FLAGS, NUM_URLS, SlowHost, attack, make_body, run_quick_host, send
from tests.support.server import POOL, ServerProcess, serve
from tests.support.waiting import wait_until

# In short: tests/unit/multimodal/fetching.
pytestmark = [pytest.mark.xdist_group("attack-slow-hosts"), pytest.mark.slow]

BOUND_S = 60.0
MIN_ROUNDS = 3
# No fetch of the attack ends by itself while the neighbours ask.
PATIENT = ("--media-deadline", "3600")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve("sensorium-mini", *FLAGS, *PATIENT, *POOL) as server:
        yield server


def ask_about(server: ServerProcess, *urls: str) -> Answer:
    began = time.monotonic()
    response = server.post("/v1/chat/completions", make_body(list(urls)))
    content = ""
    if response.status_code == 200:
        content = response.json()["choices"][0]["message"]["content"]
    return Answer(
        kind="fetched picture",
        seconds=time.monotonic() - began,
        status=response.status_code,
        content=content or response.text,
    )


def fetch_while(server: ServerProcess, quick: str, is_over: threading.Event) -> list[Answer]:
    """Ask about a new picture at a quick host, at least a few times."""
    answers: list[Answer] = []
    while len(answers) < MIN_ROUNDS or not is_over.is_set():
        answers.append(ask_about(server, f"{quick}/{len(answers)}.png"))
        is_over.wait(0.1)
    return answers


@pytest.mark.parametrize(
    "urls_per_request",
    [(NUM_URLS,), (1,) * NUM_URLS, (NUM_URLS,) * 4 + (1,) * NUM_URLS],
    ids=["64 in one request", "64 requests", "both"],
)
def test_neighbours_are_answered_while_hosts_are_slow(
    server: ServerProcess, urls_per_request: tuple[int, ...]
) -> None:
    neighbours = Neighbours(server.get_url())
    is_over = threading.Event()
    with run_quick_host() as quick, ThreadPoolExecutor(1) as threads:
        expected = ask_about(server, f"{quick}/first.png").content
        with attack(server.get_url(), urls_per_request=urls_per_request) as host:
            fetching = threads.submit(fetch_while, server, quick, is_over)
            answers = neighbours.ask_while(lambda: False, min_rounds=MIN_ROUNDS)
            is_over.set()
            fetched = fetching.result()
            # Each request has its share of connections, and none has more.
            num_expected = sum(min(8, num_urls) for num_urls in urls_per_request)
            wait_until(lambda: host.num_visits >= num_expected)
            assert host.num_visits == num_expected
    assert neighbours.list_faults(answers) == []
    assert [(answer.status, answer.content) for answer in fetched] == [(200, expected)] * len(
        fetched
    )
    assert max(answer.seconds for answer in [*answers, *fetched]) < BOUND_S


def test_a_client_that_leaves_ends_its_fetches(server: ServerProcess) -> None:
    host = SlowHost()
    try:
        with send(server.get_url(), make_body([host.make_url() for _ in range(NUM_URLS)])):
            wait_until(lambda: host.num_visits == 8)
            assert host.count_left() == 0
        wait_until(lambda: host.count_left() == 8)
        assert host.num_visits == 8  # the others never began
    finally:
        host.close()


def test_the_media_of_a_request_has_one_deadline() -> None:
    """64 slow URLs take no longer than one of them, and the answer names their host."""
    flags = (*FLAGS, *PATIENT, "--media-request-deadline", "2")
    host = SlowHost()
    try:
        with serve("sensorium-mini", *flags) as server:
            for num_urls in (1, NUM_URLS):
                refused = ask_about(server, *(host.make_url() for _ in range(num_urls)))
                assert refused.status == 422, refused
                assert (
                    "media from 127.0.0.1: the media was not delivered within 2 s, the limit for "
                    "all media of one request together" in refused.content
                )
                assert refused.seconds < BOUND_S
    finally:
        host.close()
