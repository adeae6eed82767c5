"""Processes of a server are killed under load: their requests end clearly, the others continue."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.fault_load import (
    Crowd,
    Reply,
    ask,
    ask_all,
    check_counters_never_fall,
    count_open_files,
    has_connection,
    make_body,
    make_image_url,
    wait_until_files_are,
    wait_until_idle,
)
from tests.integration.media_hosts import MediaServer, Visit, reply
from tests.support.media import make_pixels, write_image
from tests.support.server import START_TIMEOUT_S, ServerProcess, get_descendants, is_alive, kill
from tests.support.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.xdist_group("server-faults")
LONG = 3900  # no machine is so fast that it ends before something has happened to it


def make_questions(max_tokens: int = 24) -> list[dict[str, Any]]:
    images = [make_image_url(seed) for seed in range(2)]
    return [
        make_body("what is it", images[0], max_tokens=max_tokens),
        make_body("and both", *images, max_tokens=max_tokens),
        make_body("no picture", max_tokens=max_tokens),
    ]


def make_load(num: int = 12, max_tokens: int = LONG) -> list[dict[str, Any]]:
    """Streams and whole answers in turn, some with images, all of them long."""
    return [
        make_body(
            f"question {index}",
            *[make_image_url(index % 5)] * (index % 4 < 2),
            max_tokens=max_tokens,
            stream=bool(index % 2),
        )
        for index in range(num)
    ]


def get_texts(replies: Sequence[Reply]) -> list[str]:
    assert all(reply.is_good for reply in replies), replies
    return [reply.text for reply in replies]


def get_child(server: ServerProcess, word: str) -> int:
    (pid,) = server.find_children(word)
    return pid


async def lose_core(server: ServerProcess) -> list[Reply]:
    """Kill the core when all of the load runs, and return what each client got."""
    crowd = Crowd(server, make_load())
    await crowd.wait_until_streaming()
    await crowd.wait_until_running(len(crowd.clients))
    kill(get_child(server, "core_main"))
    return await crowd.finish()


def is_healthy(server: ServerProcess) -> bool:
    return server.get("/health").status_code == 200


def ask_until_back(server: ServerProcess, questions: Sequence[Any]) -> list[Reply]:
    """Ask until every frontend serves again; each learns of the new core by itself."""
    replies: list[Reply] = []

    def are_good() -> bool:
        replies[:] = ask_all(server, questions)
        return all(reply.is_good for reply in replies)

    wait_until(are_good, "the core is back", START_TIMEOUT_S)
    return replies


@pytest.mark.parametrize(
    "fault_server", [pytest.param("lru", marks=pytest.mark.slow), "shm"], indirect=True
)
def test_a_killed_core_fails_its_requests_clearly_and_comes_back(
    fault_server: ServerProcess,
) -> None:
    server = fault_server
    questions = make_questions()
    expected = get_texts(ask_all(server, questions))
    before, num_files = server.get_metrics(), []
    for _ in range(2):
        replies = asyncio.run(lose_core(server))
        lost = time.monotonic()
        assert all(reply.is_lost_clearly for reply in replies), replies
        statuses = [reply.status for reply in replies]
        assert statuses == [503, 200] * (len(replies) // 2)
        texts = get_texts(ask_until_back(server, questions))
        print(f"the core was back after {time.monotonic() - lost:.1f} s")
        assert texts == expected
        wait_until_idle(server)
        num_files.append([count_open_files(pid) for pid in server.find_children("frontend_main")])
        check_counters_never_fall(before, server.get_metrics())
    for pid, num in zip(server.find_children("frontend_main"), num_files[0], strict=True):
        wait_until_files_are(pid, num)
    name = 'sensorium:process_restarts_total{kind="core"}'
    assert server.get_metrics()[name] - before[name] == 2


@pytest.mark.slow
def test_without_a_core_new_requests_are_refused_and_those_that_load_media_wait(
    fault_server: ServerProcess,
) -> None:
    server, host, is_back = fault_server, MediaServer(), threading.Event()
    picture = write_image(make_pixels(28, 28), "PNG")

    def answer_late(visit: Visit) -> None:
        is_back.wait()
        reply(200, picture)(visit)

    host.on("/late.png", answer_late)
    image = f"http://127.0.0.1:{host.port}/late.png"
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(ask, server, make_body("late", image))
        wait_until(lambda: bool(host.visits), "the picture is asked for")
        kill(get_child(server, "core_main"))
        wait_until(lambda: not is_healthy(server), "the core is missed")
        response = server.post("/v1/chat/completions", make_body("hello"))
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json()["error"]["code"] == "engine_lost"
        ask_until_back(server, [make_body(f"are you there, {i}", max_tokens=1) for i in range(12)])
        is_back.set()
        assert late.result(60).is_good
    host.close()
    wait_until_idle(server)


def test_a_killed_frontend_takes_only_its_own_requests_with_it(
    fault_server: ServerProcess,
) -> None:
    server = fault_server
    questions = make_questions()
    expected = get_texts(ask_all(server, questions))
    before = server.get_metrics()
    frontends = server.find_children("frontend_main")
    port = urlsplit(server.get_url()).port or 0

    def find_own(frontend: int, crowd: Crowd) -> list[bool]:
        return [has_connection(frontend, port, c.local_port or 0) for c in crowd.clients]

    async def lose_frontend() -> tuple[list[Reply], list[bool], int, list[int]]:
        bodies = [{**body, "stream": True} for body in make_load(8, 900)]
        crowd = Crowd(server, bodies)
        await crowd.wait_until_streaming()
        core = get_child(server, "core_main")
        kill(core, signal.SIGSTOP)  # no answer ends while a victim is chosen
        try:
            assert server.get_metrics()["vllm:num_requests_running"] == len(bodies)
            victim = max(frontends, key=lambda frontend: sum(find_own(frontend, crowd)))
            are_its, workers = find_own(victim, crowd), get_descendants(victim)
            kill(victim)
        finally:
            kill(core, signal.SIGCONT)
        return await crowd.finish(), are_its, victim, workers

    replies, are_its, victim, workers = asyncio.run(lose_frontend())
    others = [frontend for frontend in frontends if frontend != victim]
    assert any(are_its)
    assert [reply.is_good for reply in replies] == [not is_its for is_its in are_its]
    assert not any(reply.is_whole for reply, is_its in zip(replies, are_its, strict=True) if is_its)
    wait_until(
        lambda: len(server.find_children("frontend_main")) == len(frontends), "it is started again"
    )
    wait_until_idle(server)
    wait_until(lambda: not any(map(is_alive, [victim, *workers])), "its workers have ended too")
    assert get_texts(ask_all(server, questions)) == expected
    after = server.get_metrics()
    check_counters_never_fall(before, after)
    name = 'sensorium:process_restarts_total{kind="frontend"}'
    assert after[name] - before[name] == 1
    assert set(others) < set(server.find_children("frontend_main")) or not others


@pytest.mark.slow
def test_a_killed_worker_of_the_pool_fails_no_request(fault_server: ServerProcess) -> None:
    server = fault_server
    wait_until(
        lambda: (
            server.get_metrics()["sensorium:pool_workers"]
            == len(server.find_children("pool.worker"))
            == len(server.find_children("frontend_main"))
        ),
        "each frontend has its worker",
    )
    workers = server.find_children("pool.worker")
    before = server.get_metrics()

    async def lose_workers() -> list[Reply]:
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)  # so that they surely have something in hand
        pictures = [make_body(f"new {i}", make_image_url(1000 + i)) for i in range(8)]
        crowd = Crowd(server, [*pictures, *make_load(4, 100)])
        await wait_until_async(
            lambda: server.get_metrics()["sensorium:pool_running"] >= 1, "a worker has a job"
        )
        for pid in workers:
            kill(pid)
        return await crowd.finish()

    replies = asyncio.run(lose_workers())
    assert all(reply.is_good for reply in replies), replies
    # A frontend that had no job for its worker learns of its end with the next one.
    wait_until(lambda: server.get_metrics()["sensorium:pool_workers"] >= 1, "a pool is back")
    wait_until_idle(server)
    name = "sensorium:pool_restarts_total"
    assert server.get_metrics()[name] - before[name] >= 1
    assert not any(map(is_alive, workers))


def test_all_killed_processes_were_reaped(fault_server: ServerProcess) -> None:
    """Of all that was killed above."""
    wait_until_idle(fault_server)
    wait_until(lambda: all(map(is_alive, fault_server.get_process_ids())), "the dead are buried")
