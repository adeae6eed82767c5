"""Processes of a cluster are killed while it works: nothing is wrong, and nothing hangs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.integration.cluster.asking import MODEL, make_chat, make_file, make_image, make_picture
from tests.integration.cluster.conftest import CLUSTER, run_cluster
from tests.support.server import ServerProcess, get_command, get_descendants, kill
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("cluster")
_ENGINE, _FRONTEND = "ServeReplica:sensorium:Engine", "ServeReplica:sensorium:Frontend"
_CORE, _CONTROLLER = "core_main", "ServeController"
_ENCODER = "ServeReplica:sensorium:Encoder"
_TIMEOUT_S = 240.0
_FIELDS = {"max_tokens": 10, "temperature": 0}
_LONG = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}  # so that some are in flight
_NUM_PICTURES = 12  # so many that each engine is the home of some
_RUNNING = "vllm:num_requests_running"
_OURS = ("ray::", "raylet", "gcs_server", "core_main", "pool.worker")


@dataclass
class Outcomes:
    """What became of the requests of a load: answers by picture, and errors."""

    answers: list[tuple[int, str]] = field(default_factory=list)
    errors: list[tuple[int, str]] = field(default_factory=list)  # status and body


def _ask(server: ServerProcess, seed: int) -> httpx.Response:
    body = make_chat([make_picture(seed)], **_LONG)
    return httpx.post(server.get_url("/v1/chat/completions"), json=body, timeout=_TIMEOUT_S)


def _read(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


def _load(
    server: ServerProcess,
    count: int,
    *,
    strike_at: int,
    strike: Callable[[], object],
    at_once: int = 4,
) -> Outcomes:
    """Send requests, some at a time, and call `strike` when others are in flight."""
    outcomes = Outcomes()

    def run(index: int) -> None:
        if index == strike_at:
            strike()
        seed = index % _NUM_PICTURES
        try:
            answer = _ask(server, seed)
        except httpx.HTTPError as error:
            outcomes.errors.append((0, repr(error)))
            return
        if answer.status_code == 200:
            outcomes.answers.append((seed, _read(answer)))
        else:
            outcomes.errors.append((answer.status_code, answer.text))

    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(run, range(count)))
    return outcomes


def _find(server: ServerProcess, word: str) -> list[int]:
    return [pid for pid in get_descendants(server.process.pid) if word in get_command(pid)]


def _wait_for(server: ServerProcess, word: str, count: int, *, without: int) -> None:
    """Wait until there are as many processes as before one was killed, and all answer."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        found = [pid for pid in _find(server, word) if pid != without]
        if len(found) >= count and _count_engines(server) == 2:
            return
        assert time.monotonic() < deadline, [get_command(pid) for pid in found]
        time.sleep(0.5)


def _count_engines(server: ServerProcess) -> float:
    """Return how many engines of the cluster have a core that is ready."""
    try:
        return server.get_metrics()['vllm:engine_sleep_state{sleep_state="awake"}']
    except (httpx.HTTPError, KeyError):  # one that is just ending does not answer
        return 0.0


def _get_expected(server: ServerProcess) -> dict[int, str]:
    answers = {seed: _ask(server, seed) for seed in range(_NUM_PICTURES)}
    for answer in answers.values():
        answer.raise_for_status()
    return {seed: _read(answer) for seed, answer in answers.items()}


def _check(outcomes: Outcomes, expected: dict[int, str], *, count: int) -> None:
    """Check that all requests ended, with the right answer or an error that allows a retry."""
    assert len(outcomes.answers) + len(outcomes.errors) == count
    assert {text for seed, text in outcomes.answers if text != expected[seed]} == set()
    assert [error for error in outcomes.errors if error[0] not in (0, 500, 503)] == []
    assert len(outcomes.errors) <= 8  # twice what was in flight


def _retries(server: ServerProcess) -> float:
    return server.get_metrics()['sensorium:scale_retries_total{reason="lost"}']


@pytest.mark.parametrize(
    "word",
    [pytest.param(_ENGINE, id="engine"), pytest.param(_CORE, id="core", marks=pytest.mark.slow)],
)
def test_requests_of_a_killed_engine_are_run_elsewhere(cluster: ServerProcess, word: str) -> None:
    """Requests that the client has nothing of yet are run elsewhere."""
    expected = _get_expected(cluster)
    before = _retries(cluster)
    pids = _find(cluster, word)
    assert len(pids) == 2
    # By chance of hashes the engine has nothing then: once in thousands of runs.
    outcomes = _load(cluster, 40, strike_at=12, strike=lambda: kill(pids[0]), at_once=12)
    _check(outcomes, expected, count=40)
    assert outcomes.errors == []
    assert _retries(cluster) > before
    _wait_for(cluster, word, 2, without=pids[0])
    assert _get_expected(cluster) == expected


@pytest.mark.slow
def test_media_of_an_engine_that_is_gone_has_to_be_sent_again(cluster: ServerProcess) -> None:
    """A uuid that only the killed engine knew is answered with 409, as on one server."""
    names = [f"gone {index}" for index in range(12)]
    for index, name in enumerate(names):
        body = make_chat([make_picture(index, uuid=name)], **_FIELDS)
        cluster.post("/v1/chat/completions", body).raise_for_status()
    pids = _find(cluster, _ENGINE)
    kill(pids[0])
    _wait_for(cluster, _ENGINE, 2, without=pids[0])
    _get_expected(cluster)
    statuses = []
    for index, name in enumerate(names):
        named: dict[str, Any] = {"type": "image_url", "image_url": None, "uuid": name}
        answer = cluster.post("/v1/chat/completions", make_chat([named], **_FIELDS))
        statuses.append(answer.status_code)
        if answer.status_code == 409:
            assert answer.json()["error"]["missing"] == [name]
        body = make_chat([make_picture(index, uuid=name)], **_FIELDS)
        cluster.post("/v1/chat/completions", body).raise_for_status()
        again = cluster.post("/v1/chat/completions", make_chat([named], **_FIELDS))
        assert again.status_code == 200
    assert set(statuses) == {200, 409}  # by chance of hashes one engine has all: once in 2,000 runs


@pytest.mark.slow
def test_a_frontend_that_is_killed_is_replaced(cluster: ServerProcess) -> None:
    """Only requests that it had are lost: Ray's proxy answers them with an error."""
    expected = _get_expected(cluster)
    pids = _find(cluster, _FRONTEND)
    assert len(pids) == 2
    outcomes = _load(cluster, 40, strike_at=12, strike=lambda: kill(pids[0]))
    _check(outcomes, expected, count=40)
    _wait_for(cluster, _FRONTEND, 2, without=pids[0])
    assert _get_expected(cluster) == expected


@pytest.mark.slow
def test_engines_encode_by_themselves_while_the_encoder_is_gone(cluster: ServerProcess) -> None:
    def ask(seed: int) -> str:
        part = make_image(make_file(seed, "BMP", size=240), "BMP")
        answer = cluster.post("/v1/chat/completions", make_chat([part], **_FIELDS))
        answer.raise_for_status()
        return _read(answer)

    expected = ask(60)
    (pid,) = _find(cluster, _ENCODER)
    name = 'sensorium:apart_items_total{outcome="fallback"}'
    before = cluster.get_metrics()[name]
    kill(pid)
    assert ask(61)
    assert cluster.get_metrics()[name] == before + 1
    _wait_for(cluster, _ENCODER, 1, without=pid)
    cluster.reset_caches()
    assert ask(60) == expected


@pytest.mark.slow
def test_a_killed_controller_interrupts_nothing(cluster: ServerProcess) -> None:
    expected = _get_expected(cluster)
    (pid,) = _find(cluster, _CONTROLLER)
    outcomes = _load(cluster, 40, strike_at=12, strike=lambda: kill(pid))
    _check(outcomes, expected, count=40)
    assert outcomes.errors == []
    _wait_for(cluster, _CONTROLLER, 1, without=pid)
    engines = _find(cluster, _ENGINE)
    assert len(engines) == 2  # they live on
    kill(engines[0])  # the new controller replaces what is lost, as the old one would
    _wait_for(cluster, _ENGINE, 2, without=engines[0])
    assert _get_expected(cluster) == expected


@pytest.mark.slow
def test_requests_in_flight_end_when_a_cluster_is_stopped() -> None:
    cluster = run_cluster()
    server = next(cluster)
    body = make_chat("say it", stream=True, temperature=0, max_tokens=300, ignore_eos=True)

    def ask() -> list[str]:
        url = server.get_url("/v1/chat/completions")
        with httpx.stream("POST", url, json=body, timeout=_TIMEOUT_S) as answer:
            return [line for line in answer.iter_lines() if line]

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask) for _ in range(4)]
        deadline = time.monotonic() + _TIMEOUT_S
        while sum(v for k, v in server.get_metrics().items() if k.startswith(_RUNNING)) < 4:
            assert time.monotonic() < deadline
        with pytest.raises(StopIteration):
            next(cluster)
        assert [each.result()[-1] for each in asked] == ["data: [DONE]"] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_cluster_that_is_stopped_while_it_starts_leaves_nothing(
    number: signal.Signals, status: int
) -> None:
    server = ServerProcess(MODEL, *CLUSTER, command="deploy", is_cold=True)
    try:
        server.wait_for_output("Sensorium: starting")
        wait_until(lambda: bool(_find(server, _ENGINE)), "an engine is being started")
        pids = [pid for pid in server.get_process_ids() if get_command(pid)]
        server.process.send_signal(number)
        assert server.wait(_TIMEOUT_S) == status
    finally:
        if server.process.poll() is None:
            server.kill()
    assert "Traceback" not in server.output
    assert "SIGTERM received" not in server.output
    _wait_until_gone(pids)


@pytest.mark.slow
def test_nothing_is_left_when_a_cluster_is_stopped_or_killed() -> None:
    """Neither processes nor shared memory outlive the command."""
    for end in ("stop", "kill"):
        cluster = run_cluster()
        server = next(cluster)
        pids = [pid for pid in server.get_process_ids() if get_command(pid)]
        assert len(pids) > 6
        if end == "kill":
            kill(server.process.pid)
            server.process.wait(60)
        with pytest.raises(StopIteration if end == "stop" else (AssertionError, StopIteration)):
            next(cluster)
        _wait_until_gone(pids)


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S  # Ray's own helpers take their time
    while any(word in get_command(pid) for pid in pids for word in _OURS):
        assert time.monotonic() < deadline, [c for pid in pids if (c := get_command(pid))]
        time.sleep(0.5)
