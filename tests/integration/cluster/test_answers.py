"""A cluster answers as one server does, whatever the request, and counts what it did."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sensorium.server.http.middleware import SESSION_PATH
from sensorium.server.http.routes import ROUTES
from tests.integration.cluster.asking import (
    MODEL,
    Request,
    ask,
    make_chat,
    make_file,
    make_image,
    make_part,
    make_picture,
    make_requests,
)
from tests.integration.cluster.conftest import APART_BYTES
from tests.integration.speaking import read_sample
from tests.support.server import ServerProcess, get_descendants
from tests.support.talking import Talker

pytestmark = pytest.mark.xdist_group("cluster")
_WAIT_S = 120.0
_FIELDS = {"max_tokens": 6, "temperature": 0}
_LIVE_RATE = 24_000
_COMPLETED = "conversation.item.input_audio_transcription.completed"


def _check_equal(single: ServerProcess, cluster: ServerProcess, requests: list[Request]) -> None:
    """Send all requests to both, some at a time, and compare the answers."""
    for server in (single, cluster):
        server.reset_caches()
    before = [server.get_metrics() for server in (single, cluster)]
    with ThreadPoolExecutor(4) as threads:
        expected = list(threads.map(lambda request: ask(single, request), requests))
        answers = list(threads.map(lambda request: ask(cluster, request), requests))
    for request, own, wanted in zip(requests, answers, expected, strict=True):
        assert own == wanted, request
    for server in (single, cluster):
        _wait_until_idle(server)
    after = [server.get_metrics() for server in (single, cluster)]
    names = {name for found in after for name in found if name.startswith(_COUNTED)}
    names -= {name for name in names if 'handler="/metrics"' in name}
    assert len(names) > 20
    grown = [
        {name: late.get(name, 0.0) - early.get(name, 0.0) for name in names}
        for early, late in zip(before, after, strict=True)
    ]
    assert grown[1] == grown[0]
    spilled = _grow(before[1], after[1], "sensorium:scale_spills_total")
    placed = _grow(before[1], after[1], "sensorium:scale_requests_total")
    assert 0 <= spilled < placed


# What one server and a cluster must count alike: each request and how it ended, in tokens and all.
_COUNTED = (
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:request_prompt_tokens_sum",
    "vllm:request_prompt_tokens_count",
    "sensorium:refused_requests_total",
    "http_requests_total{",
)


def _grow(early: dict[str, float], late: dict[str, float], name: str) -> float:
    return late[name] - early[name]


def _wait_until_idle(server: ServerProcess) -> None:
    """Wait until all requests have ended, also those of clients that left."""
    deadline = time.monotonic() + _WAIT_S
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    while any((found := server.get_metrics())[name] for name in names):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def test_thirty_mixed_requests_are_answered_as_by_one_server(
    single: ServerProcess, cluster: ServerProcess
) -> None:
    requests = make_requests(30, seed=2)
    assert len({request.kind for request in requests}) == 30
    assert any(request.is_aborted for request in requests)
    _check_equal(single, cluster, requests)


@pytest.mark.slow
def test_three_hundred_mixed_requests_are_answered_as_by_one_server(
    single: ServerProcess, cluster: ServerProcess
) -> None:
    requests = make_requests(300, seed=3)
    kinds = Counter(request.kind for request in requests)
    assert len(kinds) >= 39
    assert kinds["abort"] >= 5
    assert {_get_route(request.path) for request in requests} == _COMPARED_ROUTES
    _check_equal(single, cluster, requests)


def _get_route(path: str) -> str:
    return "/v1/models/{model:path}" if path == f"/v1/models/{MODEL}" else path


# The others are those of metrics, resets and live sessions, which have tests of their own here, and
# `/load`, which says what runs at the moment.
_COMPARED_ROUTES = {route.path for route in ROUTES} | {"/openapi.json"}
_COMPARED_ROUTES -= {"/metrics", "/load", SESSION_PATH}
_COMPARED_ROUTES -= {path for path in _COMPARED_ROUTES if path.startswith("/reset_")}


def test_the_whole_cluster_processes_and_encodes_a_picture_once(cluster: ServerProcess) -> None:
    cluster.reset_caches()
    before = cluster.get_metrics()
    with ThreadPoolExecutor(4) as threads:
        bodies = [make_chat([make_picture(77)], **_FIELDS) for _ in range(8)]
        answers = list(threads.map(lambda body: cluster.post("/v1/chat/completions", body), bodies))
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
    after = cluster.get_metrics()
    assert _grow(before, after, 'sensorium:encoder_items_total{how="encoded"}') == 1


def test_no_file_is_sent_to_an_engine_that_has_it(cluster: ServerProcess) -> None:
    """A file above 64 KiB crosses by the object store once; a reset is noticed and healed."""
    cluster.reset_caches()
    data = make_file(5, "BMP", size=200)
    assert len(data) > 2**16
    body = make_chat([make_image(data, "BMP")], **_FIELDS)
    for _ in range(12):  # both frontends get to know it: by chance one does not, once in 2,000 runs
        cluster.post("/v1/chat/completions", body).raise_for_status()
    before = cluster.get_metrics()
    cluster.reset_caches()
    cluster.post("/v1/chat/completions", body).raise_for_status()
    after = cluster.get_metrics()
    assert _grow(before, after, 'sensorium:scale_retries_total{reason="missing"}') == 1


def test_large_media_is_encoded_remotely_and_small_media_in_the_engines(
    single: ServerProcess, cluster: ServerProcess
) -> None:
    """Equal items go to the encoder once, and the engines' own encoders see only the small one."""
    for server in (single, cluster):
        server.reset_caches()
    large, small = make_file(8, "BMP", size=240), make_file(9, "BMP", size=100)
    assert len(small) < APART_BYTES < len(large)
    before = cluster.get_metrics()
    for data in (large, small, large):
        body = make_chat([make_image(data, "BMP")], **_FIELDS)
        answers = [server.post("/v1/chat/completions", body) for server in (cluster, single)]
        own, wanted = (answer.json()["choices"] for answer in answers)
        assert own == wanted
    after = cluster.get_metrics()
    assert _grow(before, after, 'sensorium:apart_items_total{outcome="encoded"}') == 1
    assert _grow(before, after, 'sensorium:encoder_items_total{how="encoded"}') == 1


@pytest.mark.parametrize("sample", ["shapes.png", "question.flac", "moving.mp4"])
def test_media_sent_by_uuid_alone_is_found_again(cluster: ServerProcess, sample: str) -> None:
    """Whichever frontend has the request, it is routed to the engine that has the uuid."""
    part = make_part(sample, uuid=f"our {sample}")
    first = cluster.post("/v1/chat/completions", make_chat([part], **_FIELDS))
    first.raise_for_status()
    kind = part["type"]
    named = {"type": kind, kind: None, "uuid": f"our {sample}"}
    for _ in range(6):
        again = cluster.post("/v1/chat/completions", make_chat([named], **_FIELDS))
        again.raise_for_status()
        assert again.json()["choices"] == first.json()["choices"]


def test_a_uuid_is_found_at_the_engine_of_a_costlier_item(cluster: ServerProcess) -> None:
    """Both uuids are bound where the first request went, though each has a home of its own."""
    names = [f"pair {index}" for index in range(12)]
    parts = [make_picture(30 + i, uuid=name) for i, name in enumerate(names)]
    cluster.post("/v1/chat/completions", make_chat(parts, **_FIELDS)).raise_for_status()
    before = cluster.get_metrics()
    for name in names:
        named = {"type": "image_url", "image_url": None, "uuid": name}
        answer = cluster.post("/v1/chat/completions", make_chat([named], **_FIELDS))
        answer.raise_for_status()
    moved = _grow(before, cluster.get_metrics(), 'sensorium:scale_retries_total{reason="moved"}')
    assert 0 < moved < 12  # by chance of hashes all might have one home: once in 2,000 runs


def test_a_uuid_stands_for_one_picture_in_the_whole_cluster(cluster: ServerProcess) -> None:
    first = make_chat([make_picture(50, uuid="taken")], **_FIELDS)
    cluster.post("/v1/chat/completions", first).raise_for_status()
    for seed in (51, 52):
        other = make_chat([make_picture(seed, uuid="taken")], **_FIELDS)
        refused = cluster.post("/v1/chat/completions", other)
        assert refused.status_code == 400
        assert "first used for another image" in refused.text


def test_a_live_session_is_transcribed_as_by_one_server(
    single: ServerProcess, cluster: ServerProcess
) -> None:
    texts = []
    for server in (single, cluster):
        with Talker(server.get_url(), "?intent=transcription") as talker:
            talker.set_input(turn_detection=None)
            for _ in range(2):
                talker.say(read_sample("speech", _LIVE_RATE), step=_LIVE_RATE)
                talker.commit()
                *_, last = talker.receive_until(_COMPLETED)
                texts.append(last["transcript"])
    assert texts[0]
    assert len(set(texts)) == 1


def test_all_processes_listen_on_this_machine_only(cluster: ServerProcess) -> None:
    inodes = {
        link.readlink().name.removeprefix("socket:[").removesuffix("]")
        for pid in [cluster.process.pid, *get_descendants(cluster.process.pid)]
        for link in Path(f"/proc/{pid}/fd").glob("*")
        if _is_socket(link)
    }
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:  # it listens
                found.add(words[1].split(":")[0])
    assert len(found) >= 1
    local = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert found <= local


def _is_socket(link: Path) -> bool:
    try:
        return link.readlink().name.startswith("socket:[")
    except OSError:  # the descriptor was closed meanwhile
        return False
