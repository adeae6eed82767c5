"""Whatever comes in, bytes or a `RequestError` come out."""

from __future__ import annotations

import asyncio
import base64
import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from httpcore import AnyIOBackend, AsyncNetworkStream

import sensorium.multimodal.fetching
from sensorium.multimodal.fetching.fetch import Fetch
from sensorium.multimodal.media import MediaBytes, MediaLimits
from sensorium.types.errors import CapacityError, MediaFetchError, RequestError
from sensorium.utils.pausing import run_through
from tests.support.loading import BlockingLoader


async def refuse_to_connect(*_: object) -> AsyncNetworkStream:
    raise ConnectionRefusedError


@pytest.fixture
def loader() -> Iterator[BlockingLoader]:
    """Make a loader for which every name has the same public address, without a listener."""
    loader = BlockingLoader(
        MediaLimits(max_bytes=1000, deadline_s=60.0),
        resolve=lambda *_: ["8.8.8.8"],
        connect=refuse_to_connect,
    )
    yield loader
    loader.close()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_raw_bytes_are_taken_as_they_are(loader: BlockingLoader, kind: type) -> None:
    assert loader.load(kind(b"picture"), "image") == MediaBytes(b"picture")


def test_bytes_are_shared_and_mutable_buffers_are_copied(loader: BlockingLoader) -> None:
    fixed, changing = b"picture", bytearray(b"picture")
    assert loader.load(fixed, "image").data is fixed
    media = loader.load(changing, "image")
    changing[0] = 0
    assert media.data == b"picture"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (bytes(1001), "size"),
        (memoryview(bytes(2002))[::2], "size"),
        (memoryview(bytearray(2000)).cast("i"), "size"),
        (b"", "empty"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png", "malformed"),
        ("ftp://host/", "malformed"),
        ("", "malformed"),
        ("picture.png", "malformed"),
        (" http://host/", "malformed"),
        (None, "malformed"),
        (7, "malformed"),
        ("http://user@host/", "malformed"),
        ("http://127.0.0.1/", "address"),
        ("http://host/", "connection"),
        ("file:///etc/passwd", "local_file"),
    ],
)
def test_refusals_are_counted_by_reason(
    loader: BlockingLoader, source: object, reason: str
) -> None:
    with pytest.raises(RequestError):
        loader.load(source, "image")  # type: ignore[arg-type]
    assert loader.statistics().refusals == {reason: 1}


def test_a_modality_that_does_not_exist_is_refused(loader: BlockingLoader) -> None:
    with pytest.raises(RequestError, match="not 'smell'"):
        loader.load(b"rose", "smell")


def test_files_are_read_below_the_allowed_path(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"picture")
    loader = BlockingLoader(MediaLimits(allowed_local_path=tmp_path))
    assert loader.load(f"file://{tmp_path}/cat.png", "image").data == b"picture"
    loader.close()


def test_results_come_in_the_order_of_their_items(loader: BlockingLoader) -> None:
    one = "data:;base64," + base64.b64encode(b"one").decode()
    items = [(one, "image"), ("http://host/", "audio"), (b"two", "video"), (b"", "image")]
    first, refused, second, empty = (loaded.outcome for loaded in loader.load_all(items))
    assert (first, second) == (MediaBytes(b"one"), MediaBytes(b"two"))
    assert isinstance(refused, MediaFetchError)
    assert isinstance(empty, RequestError)
    assert loader.load_all([]) == []


def test_a_url_that_is_named_twice_is_loaded_once() -> None:
    loader = BlockingLoader(
        MediaLimits(), resolve=lambda *_: ["8.8.8.8"], connect=refuse_to_connect
    )
    one, other = loader.load_all([("http://host/", "image")] * 2)
    assert one is other  # what came, and how long it took
    assert loader.statistics().refusals == {"connection": 1}
    loader.close()


def test_sources_without_waiting_use_no_thread(
    loader: BlockingLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader._file_threads, "submit", pytest.fail)
    monkeypatch.setattr(loader, "_get_fetcher", pytest.fail)
    items = [(b"one", "image"), ("data:,two", "image"), ("DATA:,three", "image")]
    loaded = [MediaBytes(content) for content in (b"one", b"two", b"three")]
    assert [entry.outcome for entry in loader.load_all(items)] == loaded


def test_what_was_loaded_is_counted_by_the_kind_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"picture")
    loader = BlockingLoader(MediaLimits(allowed_local_path=tmp_path))
    sources = [b"four", bytearray(b"1"), "data:,two", "DATA:,three", f"file://{tmp_path}/cat.png"]
    loader.load_all([(source, "image") for source in [*sources, b"", "file:///none"]])
    statistics = loader.statistics()
    assert statistics.loaded_bytes == {"bytes": 5, "data": 8, "file": 7}
    assert statistics.num_bytes == 0  # of responses
    loader.close()


def test_each_item_has_its_own_time_although_they_are_loaded_side_by_side(
    loader: BlockingLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = loader._get_fetcher().client
    clock = SimpleNamespace(now=0.0, is_past=asyncio.Event())

    async def fetch(url: httpx.URL, modality: str, _: Fetch) -> MediaBytes:
        if url.path == "/a":  # and then the other one continues, when its time has come
            clock.now = 1.0
            clock.is_past.set()
            return MediaBytes(modality.encode())
        await clock.is_past.wait()
        clock.now = 5.0
        raise MediaFetchError("gone")

    monkeypatch.setattr(client, "fetch", fetch)
    monkeypatch.setattr(
        "sensorium.multimodal.fetching.http_client.time",
        SimpleNamespace(monotonic=lambda: clock.now),
    )
    results = loader.load_all([("http://host/b", "image"), ("http://host/a", "image")])
    assert [loaded.fetch_s for loaded in results] == [5.0, 1.0]


def test_a_wrong_list_of_domains_is_refused_at_the_start() -> None:
    with pytest.raises(RequestError, match="allowed media domain"):
        BlockingLoader(MediaLimits(allowed_domains=frozenset({"https://example.com"})))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1", "[::1]", "LOCALHOST."])
def test_the_system_s_own_names_are_refused_before_any_connection(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    dialled: list[object] = []
    monkeypatch.setattr(AnyIOBackend, "connect_tcp", lambda *a, **_: dialled.append(a))
    loader = BlockingLoader(MediaLimits(deadline_s=60.0))
    with pytest.raises(MediaFetchError, match="to a non-public address"):
        loader.load(f"http://{host}/", "image")
    assert dialled == []
    loader.close()


def test_private_addresses_are_dialled_when_they_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled: list[object] = []

    async def dial(_: object, *address: object, **__: object) -> AsyncNetworkStream:
        dialled.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(AnyIOBackend, "connect_tcp", dial)
    loader = BlockingLoader(MediaLimits(allow_private_addresses=True))
    with pytest.raises(MediaFetchError, match="no connection to the host could be made"):
        loader.load("http://127.1:8000/", "image")
    assert dialled == [("127.0.0.1", 8000)]
    loader.close()


SEEDS = [
    "http://media.example:8080/cat.png?size=1#part",
    "https://user:word@[2001:db8::1%25eth0]:443/a/../b",
    "http://0x7f.0.0.1/%2e%2e/",
    "http://bücher.example/ä",
    "file://localhost/etc/../etc/passwd",
    "data:image/png;name=a;base64,iVBORw0KGgo=",
    "data:text/plain;charset=utf-8,%41%42",
]
ALPHABET = [
    *":/?#[]@!$&'()*+,;=%.-_~\\ \t\r\n\x00aZ09xÄ¹é。\uff11\ud800\U0001f600",
    "//",
    "%00",
    "xn--",
]


def mutate(rng: random.Random, source: str) -> str:
    characters = list(source)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(characters) + 1)
        length = rng.choice([0, 1, 1, 5])
        characters[place : place + length] = rng.choices(ALPHABET, k=rng.choice([0, 1, 1, 3]))
    return "".join(characters)


@pytest.mark.parametrize("seed", range(7))
def test_mutated_urls_give_bytes_or_a_request_error(
    loader: BlockingLoader, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    texts: list[str] = []
    for _ in range(200):
        source = mutate(rng, SEEDS[seed])
        try:
            assert loader.load(source, "image").data
        except RequestError as error:
            texts.append(str(error))
    assert len(texts) > 20
    assert not [text for text in texts if "8.8.8.8" in text or str(tmp_path) in text]


def test_it_is_imported_without_the_libraries_of_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = "sensorium.multimodal.fetching"
    monkeypatch.setattr(sensorium.multimodal, "fetching", sensorium.multimodal.fetching)
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("httpx", "httpcore", "h11", "av", "soxr", "blake3"):
        monkeypatch.setitem(sys.modules, name, None)
    fresh = importlib.import_module(f"{package}.loader").MediaLoader(MediaLimits())
    (loaded,) = run_through(fresh.load_pausing([("data:,x", "image")]))
    assert loaded.outcome.data == b"x"
    with pytest.raises(ModuleNotFoundError):
        run_through(fresh.load_pausing([("http://host/", "image")]))
    fresh.close()
    # What this import has added must not outlive it.
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


def test_a_loader_that_was_closed_has_no_room_for_more() -> None:
    loader = BlockingLoader(MediaLimits())
    loader.close()
    with pytest.raises(CapacityError, match="stopping"):
        loader.load_all([("http://127.0.0.1/", "image")])
