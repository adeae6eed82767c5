"""Hosts that want more than to send a picture: each is refused, soon and with little memory.

Every case names what the client may learn; no text holds an address that the client didn't send,
or another library's words.
"""

from __future__ import annotations

import gzip
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from sensorium.types.errors import MediaFetchError, RequestError
from tests.integration.media_hosts import (
    ALSO_PUBLIC,
    PUBLIC,
    Behaviour,
    MediaServer,
    Network,
    Visit,
    reply,
    say,
)
from tests.support.loading import BlockingLoader

HOST = "media.example"
MAX_BYTES = 2**20
DEADLINE_S = 0.5
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"


@pytest.fixture
def server() -> Iterator[MediaServer]:
    server = MediaServer()
    yield server
    server.close()


@pytest.fixture
def network(server: MediaServer) -> Network:
    return Network(server, {HOST: [[PUBLIC]], "other.example": [[PUBLIC]]})


@pytest.fixture
def make_loader(network: Network) -> Iterator[Callable[..., BlockingLoader]]:
    made: list[BlockingLoader] = []

    def make(**options: object) -> BlockingLoader:
        made.append(network.loader(**{"max_bytes": MAX_BYTES, "deadline_s": 60.0} | options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def refuse(loader: BlockingLoader, url: str = f"http://{HOST}/", within_s: float = 180.0) -> str:
    """Loads what can't be had; returns the text for the client."""
    begin = time.monotonic()
    with pytest.raises(RequestError) as caught:
        loader.load(url, "image")
    assert time.monotonic() - begin < within_s
    text = str(caught.value)
    for leak in ("127.0.0.1", PUBLIC, "169.254", "::1", "http", "h11", "Error", "Errno", "0x"):
        assert leak not in text.replace("HTTP", "").replace("http(s)", ""), text
    assert caught.value.__cause__ is None
    return text


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("http://127.0.0.1/", "to a non-public address"),
        ("http://127.0.0.1:8000/", "to a non-public address"),
        ("http://169.254.169.254/latest/meta-data/", "to a non-public address"),
        ("http://[::1]/", "to a non-public address"),
        ("http://[::ffff:169.254.169.254]/", "to a non-public address"),
        ("http://0x7f000001/", "to a non-public address"),
        ("//2130706433/", "to a non-public address"),
        ("http://0/", "to a non-public address"),
        ("http://inside.example/", "to a non-public address"),
        ("http://missing.example/", "to a non-public address"),
        ("file:///etc/passwd", "leads to no http(s) URL"),
        ("data:image/png;base64,AAAA", "leads to no http(s) URL"),
        ("ftp://media.example/", "leads to no http(s) URL"),
        ("http://user:word@media.example/", "leads to no http(s) URL"),
        ("http://media.example:0/", "leads to no http(s) URL"),
        ("http://[broken/", "leads to no http(s) URL"),
        ("http://\xe9\xff/", "to a non-public address"),
    ],
)
def test_a_redirect_is_checked_like_the_first_address(
    server: MediaServer, location: str, text: str
) -> None:
    network = Network(server, {HOST: [[PUBLIC]], "inside.example": [["10.0.0.7"]]})
    server.on("/", reply(302, Location=location))
    loader = network.loader(max_bytes=MAX_BYTES)
    assert text in refuse(loader)
    assert network.connected == [(PUBLIC, 80)]
    loader.close()


def test_a_redirect_without_a_location_is_refused(
    server: MediaServer, make_loader: Callable[..., BlockingLoader]
) -> None:
    server.on("/", reply(301))
    assert "leads to no http(s) URL" in refuse(make_loader())


def test_a_redirect_out_of_the_allowed_domains_is_refused(
    server: MediaServer, network: Network, make_loader: Callable[..., BlockingLoader]
) -> None:
    server.on("/", reply(307, Location="http://other.example/"))
    loader = make_loader(allowed_domains=frozenset({HOST}))
    assert refuse(loader) == (
        f"media from {HOST}: the URL leads to a domain that is not in allowed_media_domains"
    )
    assert network.looked_up == [HOST]


def test_a_chain_of_redirects_ends(
    server: MediaServer, make_loader: Callable[..., BlockingLoader]
) -> None:
    server.on("/", reply(302, Location="/"))
    assert "more than 3 redirects" in refuse(make_loader(max_redirects=3))
    assert len(server.visits) == 4


def test_as_many_redirects_as_allowed_are_followed(
    server: MediaServer, make_loader: Callable[..., BlockingLoader]
) -> None:
    server.on("/", reply(302, Location="/1"))
    server.on("/1", reply(308, Location="2#part"))
    server.on("/2", reply(200, b"picture"))
    loader = make_loader(max_redirects=2)
    assert loader.load(f"http://{HOST}/", "image").data == b"picture"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f.0.0.1/",
        "http://0177.1/",
        "http://127.0.0.1./",
        "http://[::1]/",
        "http://[::ffff:7f00:1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://[2002:7f00:1::]/",
        "http://10.1.2.3/",
        "http://100.64.0.1/",
        "http://0.0.0.0/",
        "https://169.254.169.254/",
        "http://inside.example/",
        "http://INSIDE.example./",
        "http://half.example/",
        "http://broken.example/",
        "http://nothing.example/",
        "http://missing.example/",
    ],
)
def test_no_connection_is_made_to_addresses_that_are_not_public(
    server: MediaServer, url: str
) -> None:
    names = {
        "inside.example": [["192.168.0.1"]],
        "half.example": [[PUBLIC, "127.0.0.1"]],
        "broken.example": [["not an address"]],
        "nothing.example": [[]],
    }
    network = Network(server, {name: [*answers] for name, answers in names.items()})
    loader = network.loader()
    with pytest.raises(MediaFetchError, match="to a non-public address"):
        loader.load(url, "image")
    assert network.connected == []
    loader.close()


def test_names_with_changing_addresses_are_connected_to_as_checked(
    server: MediaServer,
) -> None:
    """Each connection looks the name up once: there is no second answer to be fooled by."""
    network = Network(server, {HOST: [[PUBLIC], ["127.0.0.1"]]})
    server.on("/", reply(200, b"picture"))
    loader = network.loader()
    assert loader.load(f"http://{HOST}/", "image").data == b"picture"
    assert (network.looked_up, network.connected) == ([HOST], [(PUBLIC, 80)])
    with pytest.raises(MediaFetchError, match="to a non-public address"):
        loader.load(f"http://{HOST}/", "image")
    assert network.connected == [(PUBLIC, 80)]
    loader.close()


def test_a_redirect_to_the_same_name_is_looked_up_and_checked_again(server: MediaServer) -> None:
    network = Network(server, {HOST: [[PUBLIC], ["127.0.0.1"]]})
    server.on("/", reply(302, Location="/again"))
    loader = network.loader()
    assert "to a non-public address" in refuse(loader)
    assert network.connected == [(PUBLIC, 80)]
    loader.close()


def test_the_next_address_is_tried_when_one_does_not_answer(server: MediaServer) -> None:
    network = Network(server, {HOST: [[ALSO_PUBLIC, PUBLIC]]})
    server.on("/", reply(200, b"picture"))
    connect = network.connect
    allowed_s: list[float] = []

    async def connect_to_v4(address: str, port: int, timeout_s: float) -> object:
        allowed_s.append(timeout_s)
        connection = await connect(address, port, timeout_s)
        if ":" in address:
            await connection.aclose()
            raise ConnectionRefusedError
        return connection

    network.connect = connect_to_v4  # type: ignore[method-assign,assignment]
    loader = network.loader(deadline_s=100.0)
    assert loader.load(f"http://{HOST}/", "image").data == b"picture"
    assert network.connected == [(ALSO_PUBLIC, 80), (PUBLIC, 80)]
    # The first may use half of the time, the last all that is left.
    assert allowed_s[0] <= 50 < allowed_s[1] <= 100
    loader.close()


def send_endlessly(start: bytes, chunk: bytes) -> Behaviour:
    def send(visit: Visit) -> None:
        visit.send(start)
        while not visit.stopping.is_set():
            visit.send(chunk)

    return send


def drip(start: bytes, chunk: bytes) -> Behaviour:
    """Too slow to arrive, too fast for a timeout of any single read."""

    def send(visit: Visit) -> None:
        visit.send(start)
        visit.drip(itertools.repeat(chunk), 0.02)

    return send


ENDLESS = {
    "body": (send_endlessly(HEAD + b"\r\n", b"x" * 65536), "larger than"),
    "chunked body": (
        send_endlessly(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"8000\r\n%s\r\n" % (b"x" * 32768)
        ),
        "larger than",
    ),
    "chunk size": (
        send_endlessly(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0" * 1024),
        "not complete, valid HTTP",
    ),
    "tiny chunks": (
        send_endlessly(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 1000),
        "too many tiny chunks",
    ),
    "interim answers": (
        send_endlessly(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000),
        "not complete, valid HTTP",
    ),
    "headers": (send_endlessly(HEAD, b"X-More: and more\r\n" * 100), "not complete, valid HTTP"),
    "header line": (send_endlessly(HEAD + b"X: ", b"y" * 65536), "not complete, valid HTTP"),
    "status line": (send_endlessly(b"HTTP/1.1 200 ", b"y" * 65536), "not complete, valid HTTP"),
    "trailers": (
        send_endlessly(HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n" * 1000),
        "not complete, valid HTTP",
    ),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_endless_answers_are_cut_off(
    server: MediaServer, make_loader: Callable[..., BlockingLoader], what: str
) -> None:
    behaviour, text = ENDLESS[what]
    server.on("/", behaviour)
    assert text in refuse(make_loader())
    # What the two sockets hold is theirs; no more than the cap was read from them.
    assert server.visits[0].num_sent < MAX_BYTES + 16 * 2**20


SLOW = {
    "silence": lambda visit: visit.drip([b"x"], 1000),
    "status line": drip(b"", b"H"),
    "headers": drip(HEAD, b"X: y\r\n"),
    "one header": drip(HEAD + b"X: ", b"y"),
    "body": drip(HEAD + b"Content-Length: 100000\r\n\r\n", b"x"),
    "chunks": drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "body without a length": drip(HEAD + b"\r\n", b"x"),
    "early hints": drip(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "redirects": lambda visit: (
        visit.drip([b"HTTP/1.1 302 Found\r\n"], 0.2),
        visit.send(b"Location: /\r\n\r\n"),
    ),
}


@pytest.mark.parametrize("what", SLOW)
def test_slow_answers_are_given_up_at_the_deadline(
    server: MediaServer, make_loader: Callable[..., BlockingLoader], what: str
) -> None:
    server.on("/", SLOW[what])
    loader = make_loader(deadline_s=DEADLINE_S)
    assert "not delivered within 0.5 s" in refuse(loader, within_s=DEADLINE_S + 120.0)
    assert loader.statistics().refusals == {"deadline": 1}


def test_a_handshake_that_never_ends_is_given_up_at_the_deadline(
    server: MediaServer, make_loader: Callable[..., BlockingLoader]
) -> None:
    server.greeting = drip(b"\x16\x03\x03\x10\x00", b"\x02")
    loader = make_loader(deadline_s=DEADLINE_S)
    assert "within 0.5 s" in refuse(loader, f"https://{HOST}/", within_s=DEADLINE_S + 120.0)


def test_a_look_up_that_never_ends_is_given_up_at_the_deadline(server: MediaServer) -> None:
    network = Network(server, {})
    over = threading.Event()
    network.resolve = lambda *_: over.wait(120) and [PUBLIC]  # type: ignore[method-assign]
    loader = network.loader(deadline_s=DEADLINE_S)
    assert "not delivered within 0.5 s" in refuse(loader, within_s=DEADLINE_S + 120.0)
    over.set()
    loader.close()
    assert network.connected == []


BROKEN = {
    "gzip bomb": (
        reply(200, gzip.compress(bytes(50 * MAX_BYTES)), Content_Encoding="gzip"),
        "response is compressed",
    ),
    "brotli": (reply(200, b"x", Content_Encoding="identity, br"), "response is compressed"),
    "gzip as transfer": (
        say(HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + gzip.compress(b"x")),
        "not complete, valid HTTP",
    ),
    "length above the cap": (reply(200, b"x", Content_Length=str(MAX_BYTES + 1)), "larger than"),
    "length of many digits": (reply(200, b"x", Content_Length="9" * 20), "larger than"),
    "length of too many digits": (reply(200, b"x", Content_Length="9" * 5000), "valid HTTP"),
    "length above the body": (reply(200, b"x", Content_Length="2"), "not complete, valid HTTP"),
    "negative length": (reply(200, b"x", Content_Length="-1"), "not complete, valid HTTP"),
    "length that is no number": (reply(200, b"x", Content_Length="1e3"), "not complete, valid"),
    "two lengths": (
        say(HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxy"),
        "not complete, valid HTTP",
    ),
    "truncated chunks": (
        say(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"),
        "not complete, valid HTTP",
    ),
    "chunks of no size": (
        say(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab"),
        "not complete, valid HTTP",
    ),
    "chunks of negative size": (
        say(HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nab"),
        "not complete, valid HTTP",
    ),
    "html": (reply(200, b"<html>", Content_Type="text/html; charset=utf-8"), "content type"),
    "json": (reply(200, b"{}", Content_Type="application/json"), "content type"),
    "sound": (reply(200, b"RIFF", Content_Type="audio/wav"), "content type"),
    "odd type": (reply(200, b"x", Content_Type="images"), "content type"),
    "no content": (reply(204), "status 204"),
    "not modified": (reply(304), "status 304"),
    "partial": (reply(206, b"x"), "status 206"),
    "missing": (reply(404, b"picture"), "status 404"),
    "failure": (reply(500, b"picture"), "status 500"),
    "switching protocols": (reply(101, Upgrade="h2c"), "not complete, valid HTTP"),
    "empty body": (reply(200, b""), "the media is empty"),
    "silence": (say(b""), "not complete, valid HTTP"),
    "garbage": (say(bytes(range(256)) * 10), "not complete, valid HTTP"),
    "another protocol": (say(b"220 mail.example ESMTP\r\n"), "not complete, valid HTTP"),
    "old HTTP": (say(b"\x89PNG\r\n\x1a\n"), "not complete, valid HTTP"),
    "header with a NUL": (say(HEAD + b"X: \0\r\n\r\nx"), "not complete, valid HTTP"),
    "reset": (lambda visit: visit.reset(), "the connection to the host broke"),
    "reset in the body": (
        lambda visit: (visit.send(HEAD + b"Content-Length: 9\r\n\r\nx"), visit.reset()),
        "media from",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_answer_that_is_no_picture_is_refused(
    server: MediaServer, make_loader: Callable[..., BlockingLoader], what: str
) -> None:
    behaviour, text = BROKEN[what]
    server.on("/", behaviour)
    assert text in refuse(make_loader())
    assert len(server.visits) == 1


def test_a_body_beyond_its_stated_length_is_not_read(
    server: MediaServer, make_loader: Callable[..., BlockingLoader]
) -> None:
    server.on("/", reply(200, b"picture and more", Content_Length="7"))
    assert make_loader().load(f"http://{HOST}/", "image").data == b"picture"


@pytest.mark.parametrize("num_extra", [0, 1])
def test_the_cap_is_exact_when_no_length_is_stated(
    server: MediaServer, make_loader: Callable[..., BlockingLoader], num_extra: int
) -> None:
    server.on("/", reply(200, b"x" * (100 + num_extra), Content_Length=""))
    loader = make_loader(max_bytes=100)
    if num_extra:
        assert "larger than 100 bytes" in refuse(loader)
    else:
        assert len(loader.load(f"http://{HOST}/", "image").data) == 100


def test_https_to_a_port_without_tls_is_refused(
    server: MediaServer, make_loader: Callable[..., BlockingLoader]
) -> None:
    server.greeting = say(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    text = refuse(make_loader(), f"https://{HOST}/")
    assert text == f"media from {HOST}: the TLS handshake with the host failed"


def test_a_host_without_a_listener_is_refused(server: MediaServer) -> None:
    network = Network(server, {HOST: [[PUBLIC]]})

    async def fail(*_: object) -> None:
        raise ConnectionRefusedError(111, f"refused by {PUBLIC}")

    network.connect = fail  # type: ignore[method-assign,assignment]
    loader = network.loader()
    assert refuse(loader) == f"media from {HOST}: no connection to the host could be made"
    loader.close()


def test_bad_items_do_not_affect_a_good_one(
    server: MediaServer, make_loader: Callable[..., BlockingLoader]
) -> None:
    server.on("/slow", SLOW["body"])
    server.on("/html", BROKEN["html"][0])
    server.on("/good", reply(200, b"picture"))
    names = ["slow", "html", "good", "missing"]
    loader = make_loader(deadline_s=5.0)  # also that of the three that take no time
    loaded = loader.load_all([(f"http://{HOST}/{name}", "image") for name in names])
    results = [entry.outcome for entry in loaded]
    reasons = [getattr(result, "reason", None) for result in results]
    assert reasons == ["deadline", "content_type", None, "status"]
    assert results[2].data == b"picture"  # type: ignore[union-attr]
