"""Pictures from hosts as they should be: what is sent, what is kept, and what is fetched once."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest

from sensorium.multimodal.fetching.fetch import FetchShares
from sensorium.multimodal.media import MediaBytes, MediaLimits
from sensorium.types.errors import CapacityError, MediaFetchError
from tests.integration.media_hosts import (
    PUBLIC,
    WAIT_S,
    MediaServer,
    Network,
    Visit,
    be_silent,
    reply,
)
from tests.support.loading import BlockingLoader
from tests.support.waiting import wait_until

HOST = "media.example"
URL = f"http://{HOST}/"
NOW = 1_800_000_000.0


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> Iterator[MediaServer]:
    server = MediaServer()
    yield server
    server.close()


@pytest.fixture
def network(server: MediaServer) -> Network:
    return Network(server, {HOST: [[PUBLIC]]})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loader(network: Network, clock: Clock) -> Iterator[BlockingLoader]:
    loader = network.loader(clock=clock, deadline_s=WAIT_S)
    yield loader
    loader.close()


def head_of(visit: Visit) -> dict[str, str]:
    lines = visit.head.decode().split("\r\n")
    return dict(line.split(": ", 1) for line in lines[1:] if line) | {"": lines[0]}


def test_a_request_sends_only_the_necessary_headers(
    server: MediaServer,
    network: Network,
    loader: BlockingLoader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.on("/cat.png?size=1&name=%C3%A4", reply(200, b"picture", Set_Cookie="a=b"))
    for _ in range(2):
        loader.load("http://Media.Example.:8080/cat.png?size=1&name=ä#part", "image")
    assert network.connected == [(PUBLIC, 8080)] * 2
    assert head_of(server.visits[1]) == {
        "": "GET /cat.png?size=1&name=%C3%A4 HTTP/1.1",
        "Host": "media.example:8080",
        "User-Agent": "sensorium",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "Connection": "close",
    }


@pytest.mark.parametrize(
    ("content_type", "modality", "is_taken"),
    [
        ("image/png", "image", True),
        ("IMAGE/WebP ; x=y", "image", True),
        ("", "image", True),
        ("application/octet-stream", "image", True),
        ("binary/octet-stream", "video", True),
        ("video/mp4", "video", True),
        ("image/gif", "video", True),
        ("audio/mpeg", "audio", True),
        ("application/ogg", "audio", True),
        ("video/webm", "audio", True),
        ("video/mp4", "image", False),
        ("audio/mpeg", "video", False),
        ("image/png", "audio", False),
        ("application/pdf", "image", False),
    ],
)
def test_content_types_are_accepted_by_modality(
    server: MediaServer, loader: BlockingLoader, content_type: str, modality: str, is_taken: bool
) -> None:
    server.on("/", reply(200, b"picture", Content_Type=content_type))
    if is_taken:
        assert loader.load(URL, modality).data == b"picture"
    else:
        with pytest.raises(MediaFetchError, match=f"is not that of {modality}"):
            loader.load(URL, modality)


def test_a_fresh_answer_is_reused_until_it_is_stale(
    server: MediaServer, loader: BlockingLoader, clock: Clock
) -> None:
    server.on("/", reply(200, b"picture", Cache_Control="max-age=60"))
    first = loader.load(URL, "image")
    clock.now += 59
    assert loader.load(URL + "#elsewhere", "image") is first
    clock.now += 2
    assert loader.load(URL, "image") is not first
    statistics = loader.statistics()
    assert (statistics.num_fetches, statistics.num_response_cache_hits) == (2, 1)
    assert statistics.num_bytes == 14
    assert statistics.loaded_bytes == {"http": 21}


def test_a_cached_answer_is_refused_for_another_modality(
    server: MediaServer, loader: BlockingLoader
) -> None:
    server.on("/", reply(200, b"picture", Cache_Control="max-age=60"))
    loader.load(URL, "image")
    with pytest.raises(MediaFetchError, match="is not that of audio"):
        loader.load(URL, "audio")
    assert len(server.visits) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"ETag": '"v1"'},
        {"ETag": 'W/"v1"', "Cache_Control": "no-cache, max-age=60"},
        {"Last_Modified": formatdate(NOW, usegmt=True)},
    ],
)
def test_a_confirmed_answer_is_the_same_object(
    server: MediaServer, loader: BlockingLoader, headers: dict[str, str]
) -> None:
    server.on("/", reply(200, b"picture", **headers))
    first = loader.load(URL, "image")
    first.digest = "known"
    server.on("/", reply(304, Content_Type="", Content_Length=""))
    assert loader.load(URL, "image") is first
    asked = head_of(server.visits[1])
    assert asked.get("If-None-Match") == headers.get("ETag")
    assert asked.get("If-Modified-Since") == headers.get("Last_Modified")
    assert loader.statistics().num_revalidations == 1
    assert loader.statistics().num_bytes == 7


def test_a_confirmation_makes_it_fresh_again(
    server: MediaServer, loader: BlockingLoader, clock: Clock
) -> None:
    server.on("/", reply(200, b"picture", ETag='"v1"', Cache_Control="max-age=60", Age="59"))
    loader.load(URL, "image")
    clock.now += 2
    server.on("/", reply(304, Content_Length=""))
    loader.load(URL, "image")
    clock.now += 50
    loader.load(URL, "image")
    assert len(server.visits) == 2


def test_a_changed_answer_replaces_the_old_one(server: MediaServer, loader: BlockingLoader) -> None:
    server.on("/", reply(200, b"picture", ETag='"v1"'))
    loader.load(URL, "image")
    server.on("/", reply(200, b"another", ETag='"v2"'))
    assert loader.load(URL, "image").data == b"another"
    server.on("/", reply(304, Content_Length=""))
    assert loader.load(URL, "image").data == b"another"
    assert head_of(server.visits[2])["If-None-Match"] == '"v2"'


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Cache_Control": "no-store, max-age=60", "ETag": '"v1"'},
        {"Cache_Control": "private, max-age=60", "ETag": '"v1"'},
        {"Cache_Control": "max-age=60", "ETag": '"v1"', "Vary": "*"},
        {"Cache_Control": "max-age=0"},
        {"Cache_Control": "no-cache"},
    ],
)
def test_answers_that_may_not_be_cached_are_fetched_again(
    server: MediaServer, loader: BlockingLoader, headers: dict[str, str]
) -> None:
    server.on("/", reply(200, b"picture", **headers))
    for _ in range(2):
        loader.load(URL, "image")
    assert len(server.visits) == 2
    assert "If-None-Match" not in head_of(server.visits[1])


def test_a_redirect_is_fetched_again_but_its_target_is_cached(
    server: MediaServer, loader: BlockingLoader
) -> None:
    server.on("/", reply(302, Location="/target", Cache_Control="max-age=60"))
    server.on("/target", reply(200, b"picture", Cache_Control="max-age=60"))
    assert loader.load(URL, "image") is loader.load(URL, "image")
    assert [visit.head.split()[1] for visit in server.visits] == [b"/", b"/target", b"/"]


def test_an_answer_above_the_capacity_is_not_cached(server: MediaServer, network: Network) -> None:
    server.on("/", reply(200, b"picture", Cache_Control="max-age=60"))
    loader = network.loader(response_cache_bytes=10)
    for _ in range(2):
        loader.load(URL, "image")
    assert len(server.visits) == 2
    loader.close()


class Crowd:
    """Several threads that ask; `answer_all` keeps the answer back until all of them wait."""

    def __init__(self, loader: BlockingLoader, num_threads: int) -> None:
        self._loader = loader
        self._threads = [threading.Thread(target=self._load) for _ in range(num_threads)]
        self.results: list[object] = []

    def run(self) -> list[object]:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(WAIT_S)
        return self.results

    def answer_all(self, answer: Callable[[Visit], None]) -> Callable[[Visit], None]:
        def wait_then_answer(visit: Visit) -> None:
            shared = self._loader._get_fetcher().client.shared
            wait_until(lambda: shared.num_waiting == len(self._threads))
            answer(visit)

        return wait_then_answer

    def _load(self) -> None:
        try:
            self.results.append(self._loader.load(URL, "image"))
        except MediaFetchError as error:
            self.results.append(error)


def test_requests_at_the_same_time_share_one_fetch(
    server: MediaServer, loader: BlockingLoader
) -> None:
    crowd = Crowd(loader, 8)
    server.on("/", crowd.answer_all(reply(200, b"picture")))
    results = crowd.run()
    assert len(server.visits) == 1
    assert len(results) == 8
    assert all(result is results[0] for result in results)
    server.on("/", reply(200, b"picture"))
    loader.load(URL, "image")
    assert len(server.visits) == 2


def test_requests_at_the_same_time_also_share_a_refusal(
    server: MediaServer, loader: BlockingLoader
) -> None:
    crowd = Crowd(loader, 4)
    server.on("/", crowd.answer_all(reply(404)))
    results = crowd.run()
    assert len(server.visits) == 1
    assert len(set(map(id, results))) == 4
    assert {str(result) for result in results} == {
        "media from media.example: the host answered with status 404"
    }
    assert loader.statistics().refusals == {"status": 4}


def test_a_request_that_joined_late_is_not_cut_off_at_an_earlier_deadline(
    server: MediaServer, network: Network
) -> None:
    loader = network.loader(deadline_s=3.0)
    server.on("/", lambda visit: visit.drip([b"x"], 1000))
    early = threading.Thread(target=Crowd(loader, 1).run)
    early.start()
    wait_until(lambda: bool(server.visits))
    server.on("/", reply(200, b"picture"))
    fetcher = loader._get_fetcher()
    fetcher._limits = replace(fetcher._limits, deadline_s=WAIT_S)
    assert loader.load(URL, "image").data == b"picture"
    early.join(WAIT_S)
    loader.close()


def test_a_request_without_time_left_does_not_wait_for_a_shared_fetch(
    server: MediaServer, network: Network
) -> None:
    """It joined a flight that ended at an earlier deadline, and meets the next one there."""
    loader = network.loader(deadline_s=WAIT_S)
    fetcher = loader._get_fetcher()
    server.on("/", be_silent)
    with ThreadPoolExecutor(2) as threads:
        patient = threads.submit(loader.load, URL, "image")
        wait_until(lambda: bool(server.visits))
        fetcher._limits = replace(fetcher._limits, deadline_s=1e-9)
        late = threads.submit(loader.load, URL, "image")
        try:
            assert isinstance(late.exception(WAIT_S / 2), MediaFetchError)
            assert not patient.done()
        finally:
            loader.close()
            patient.exception(WAIT_S)


def test_closing_gives_up_a_fetch_that_waits_for_its_host(
    server: MediaServer, network: Network
) -> None:
    """Long before its deadline: the hour would outlast the test."""
    loader = network.loader(deadline_s=3600.0)
    server.on("/a.png", lambda visit: visit.drip([b"HTTP/1.1 200 OK\r\n"], 3600.0))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(loader.load, f"http://{HOST}/a.png", "image")
        wait_until(lambda: bool(server.visits))
        loader.close()
        assert isinstance(waiting.exception(WAIT_S), CapacityError)


def test_items_of_one_call_are_loaded_concurrently(
    server: MediaServer, loader: BlockingLoader
) -> None:
    """Each answer waits until all three have been asked for."""
    meeting = threading.Barrier(3, timeout=WAIT_S)

    def answer(visit: Visit) -> None:
        meeting.wait()
        reply(200, visit.head.split()[1])(visit)

    for name in "abc":
        server.on(f"/{name}", answer)
    items = [(URL + name, "image") for name in "abcba"]
    results = [loaded.outcome for loaded in loader.load_all([*items, (b"raw", "image")])]
    assert [result.data for result in results if isinstance(result, MediaBytes)] == [
        b"/a",
        b"/b",
        b"/c",
        b"/b",
        b"/a",
        b"raw",
    ]
    assert len(server.visits) == 3


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=media.example", "-addext", "subjectAltName=DNS:media.example"]
    files = ["-keyout", str(path), "-out", str(path)]
    key_and_certificate = [openssl, *command.split(), *names, *files]
    subprocess.run(key_and_certificate, check=True, capture_output=True, timeout=WAIT_S)
    return path


@pytest.mark.parametrize(
    ("host", "is_trusted", "text"),
    [
        ("media.example", True, None),
        ("MEDIA.example.", True, None),
        ("other.example", True, "the host's TLS certificate has expired, or can't be verified"),
        ("media.example", False, "the host's TLS certificate has expired, or can't be verified"),
    ],
)
def test_tls_is_checked_against_the_name_and_not_the_address(
    certificate: Path, host: str, is_trusted: bool, text: str | None
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    asked: list[str] = []
    tls.sni_callback = lambda _, name, __: asked.append(name)
    server = MediaServer(tls)
    server.on("/", reply(200, b"picture"))
    network = Network(server, {HOST: [[PUBLIC]], "other.example": [[PUBLIC]]})
    trusted = ssl.create_default_context(cafile=str(certificate) if is_trusted else None)
    loader = network.loader(ssl_context=trusted, deadline_s=WAIT_S)
    if text is None:
        assert loader.load(f"https://{host}/", "image").data == b"picture"
        assert head_of(server.visits[0])["Host"] == HOST
    else:
        with pytest.raises(MediaFetchError, match=text):
            loader.load(f"https://{host}/", "image")
    assert asked == [host.lower().rstrip(".")]
    assert network.connected == [(PUBLIC, 443)]
    loader.close()
    server.close()


def test_a_fetch_without_waiting_requests_is_cancelled(
    network: Network, server: MediaServer
) -> None:
    """Its turn is another's at once, and one who waits for the same URL asks again."""
    server.on("/silent", be_silent)
    server.on("/", reply(200, b"picture"))
    shares = FetchShares(max_per_request=1, max_shared=0)
    loader = network.loader(deadline_s=3600.0, shares=shares)
    cancelled: Future[None] = Future()
    silent = [(URL + "silent", "image")]
    with ThreadPoolExecutor(2) as threads:
        left = threads.submit(loader.load_all, silent, cancelled=cancelled)
        wait_until(lambda: bool(server.visits))
        stays = threads.submit(loader.load_all, silent)
        queued = threads.submit(loader.load_all, silent * 2, cancelled=cancelled)
        cancelled.set_result(None)
        for future in (left, queued):
            with pytest.raises(CancelledError):
                future.result(WAIT_S)
        (found,) = loader.load_all([(URL, "image")])
        assert isinstance(found.outcome, MediaBytes)
        assert not stays.done()
        wait_until(lambda: sum(b"/silent" in visit.head for visit in server.visits) == 2)
        loader.close()
        assert isinstance(stays.exception(WAIT_S), CapacityError)
    assert loader.statistics().refusals == {}


def test_the_request_that_holds_most_bytes_gives_way(network: Network, server: MediaServer) -> None:
    """It has a large body and waits for another one; a small picture is fetched all the same."""
    server.on("/large", reply(200, b"x" * 3000))
    server.on("/silent", be_silent)
    server.on("/small", reply(200, b"x" * 200))
    loader = network.loader(deadline_s=3600.0)
    memory = loader._get_fetcher()._memory
    memory.max_bytes = 3100
    with ThreadPoolExecutor(1) as threads:
        items = [(URL + name, "image") for name in ("large", "silent")]
        large = threads.submit(loader.load_all, items)
        wait_until(lambda: memory.num_bytes == 3000)
        assert len(loader.load(URL + "small", "image").data) == 200
        with pytest.raises(CapacityError, match="Too much media is being fetched at once"):
            large.result(WAIT_S)
    wait_until(lambda: memory.num_bytes == 0)
    loader.close()


def test_slow_fetches_of_a_request_hold_up_no_other_request(
    network: Network, server: MediaServer
) -> None:
    """They are as many as the request's share, and end with it."""
    for index in range(20):
        server.on(f"/{index}", be_silent)
    server.on("/quick", reply(200, b"picture"))
    loader = network.loader(deadline_s=3600.0)
    cancelled: Future[None] = Future()
    items = [(f"{URL}{index}", "image") for index in range(20)]
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(loader.load_all, items, cancelled=cancelled)
        wait_until(lambda: len(server.visits) == 8)
        assert loader.load(URL + "quick", "image").data == b"picture"
        cancelled.set_result(None)
        with pytest.raises(CancelledError):
            slow.result(WAIT_S)
    assert sum(b"/quick" not in visit.head for visit in server.visits) == 8
    loader.close()


def test_the_items_of_a_request_have_one_deadline(network: Network, server: MediaServer) -> None:
    """Items that were still queued fail with it; the text names the host that was waited for."""
    for index in range(20):
        server.on(f"/{index}", be_silent)
    loader = network.loader(deadline_s=3600.0, request_deadline_s=0.5)
    loaded = loader.load_all([(f"{URL}{index}", "image") for index in range(20)])
    assert {str(entry.outcome) for entry in loaded} == {
        "media from media.example: the media was not delivered within 0.5 s, the limit for all "
        "media of one request together"
    }
    assert loader.statistics().refusals == {"deadline": 20}
    loader.close()


def test_a_checked_address_is_dialled_without_another_look_up(
    server: MediaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real connection: whatever a resolver would say by now is not asked for."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a name was looked up")

    server.on("/", reply(200, b"picture"))
    limits = MediaLimits(allow_private_addresses=True, deadline_s=WAIT_S)
    loader = BlockingLoader(limits, resolve=lambda *_: ["127.0.0.1"])
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert loader.load(f"http://{HOST}:{server.port}/", "image").data == b"picture"
    loader.close()
