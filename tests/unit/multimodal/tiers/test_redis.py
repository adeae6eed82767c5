"""Entries in a real Redis: whole or absent, whatever becomes of the server."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

from sensorium.multimodal.tiers import breaker
from sensorium.multimodal.tiers import redis as tested
from sensorium.multimodal.tiers.address import parse_address
from tests.support.redis_server import RedisServer, run_redis
from tests.support.waiting import wait_until

WEEK_S = 604_800
SHORT_S = 0.3  # for servers that never answer
LONG_S = 60.0  # for servers that do, on a machine that may be busy
LARGE = [bytes(range(256)) * 4, memoryview(b"x" * 3_000_000), b""]


def name(number: int) -> str:
    return f"{number:064x}.layout-v1"


@contextmanager
def open_store(
    url: str, *, ttl_s: int = WEEK_S, patience_s: float = LONG_S
) -> Iterator[tested.RedisStore]:
    store = tested.RedisStore(parse_address(url), ttl_s=ttl_s, patience_s=patience_s)
    yield store
    store.close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(breaker, "_LONGEST_PAUSE_S", 0.05)


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a store that has failed once stay unconnected until the end of the test."""
    monkeypatch.setattr(breaker, "_FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(breaker, "_LONGEST_PAUSE_S", 3600.0)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with run_redis() as running:
        yield running


@pytest.fixture
def store(server: RedisServer) -> Iterator[tested.RedisStore]:
    with open_store(server.url) as opened:
        yield opened


def test_entries_are_shared_by_every_store_of_the_server(
    server: RedisServer, store: tested.RedisStore
) -> None:
    assert store.get(name(1)) is None
    assert not store.has(name(1))
    assert store.put(name(1), LARGE)
    with open_store(server.url) as second:
        found = second.get(name(1))
        assert found == b"".join(LARGE)
        assert isinstance(found, bytearray), "tensors need memory that may be written"
        assert second.has(name(1))
        assert not second.put(name(1), [b"other"]), "an entry never changes"
        assert second.get(name(1)) == b"".join(LARGE)
        assert second.statistics().num_hits == 2
        assert second.statistics().num_writes == 0
    counts = store.statistics()
    assert (counts.num_queries, counts.num_hits, counts.num_writes) == (1, 0, 1)
    assert (counts.num_errors, counts.num_damaged) == (0, 0)
    assert server.get_keys() == [f"sensorium:{name(1)}"]
    store.remove(name(1))
    store.remove(name(2))
    assert server.get_keys() == []


def test_databases_of_one_server_are_separate(server: RedisServer) -> None:
    with open_store(f"{server.url}?db=1") as first, open_store(f"{server.url}?db=2") as second:
        first.put(name(1), [b"content"])
        assert second.get(name(1)) is None
        assert first.get(name(1)) == b"content"


def set_raw(change: Callable[[bytes], bytes]) -> Callable[[redis.Redis, str], None]:
    def damage(client: redis.Redis, key: str) -> None:
        client.set(key, change(client.get(key)))

    return damage


def flip(place: int) -> Callable[[redis.Redis, str], None]:
    def change(value: bytes) -> bytes:
        changed = bytearray(value)
        changed[place] ^= 1
        return bytes(changed)

    return set_raw(change)


def swap_with_another(client: redis.Redis, key: str) -> None:
    client.rename(f"sensorium:{name(2)}", key)


def replace_by_list(client: redis.Redis, key: str) -> None:
    client.delete(key)
    client.rpush(key, "an", "entry")


@pytest.mark.parametrize(
    "damage",
    [
        flip(0),
        flip(20),
        flip(63),
        flip(64),
        flip(-1),
        set_raw(lambda _: b""),
        set_raw(lambda value: value[:10]),
        set_raw(lambda value: value[:-1]),
        set_raw(lambda value: value + b"\0"),
        swap_with_another,
        replace_by_list,
    ],
)
def test_a_damaged_entry_is_absent_and_removed(
    damage: Callable[[redis.Redis, str], None], server: RedisServer, store: tested.RedisStore
) -> None:
    store.put(name(1), [b"some content"])
    store.put(name(2), [b"another content"])
    with server.make_client() as client:
        damage(client, f"sensorium:{name(1)}")
    assert store.get(name(1)) is None
    assert store.statistics().num_damaged == 1
    assert store.statistics().num_errors == 0
    assert f"sensorium:{name(1)}" not in server.get_keys()
    assert store.put(name(1), [b"some content"]), "it can be written again"
    assert store.get(name(1)) == b"some content"


def test_what_is_larger_than_its_entry_is_not_fetched(
    server: RedisServer, store: tested.RedisStore
) -> None:
    def count_sent_bytes() -> int:
        return int(client.info("stats")["total_net_output_bytes"])

    with server.make_client() as client:
        store.put(name(1), [b"some content"])
        client.setrange(f"sensorium:{name(1)}", 2**23, b"\0")
        before = count_sent_bytes()
        assert store.get(name(1)) is None
        assert store.put(name(2), [bytes(2**22)])
        assert store.get(name(2), 2**20) is None
        assert count_sent_bytes() - before < 2**20
    assert store.statistics().num_damaged == 2
    assert server.get_keys() == []


def test_an_entry_lives_until_it_was_not_used_for_its_time(server: RedisServer) -> None:
    with open_store(server.url, ttl_s=5000) as store, server.make_client() as client:
        for number, use in enumerate((store.get, store.touch)):
            key = f"sensorium:{name(number)}"
            assert store.put(name(number), [b"content"])
            assert 4000 < client.ttl(key) <= 5000
            client.expire(key, 100)
            use(name(number))
            assert 4000 < client.ttl(key) <= 5000
        store.touch(name(99))
        client.pexpire(f"sensorium:{name(0)}", 1)
        wait_until(lambda: server.get_keys() == [f"sensorium:{name(1)}"], "the entry has expired")
        assert store.get(name(0)) is None
        assert store.statistics().num_errors == 0


def test_without_a_time_to_live_an_entry_stays(server: RedisServer) -> None:
    with open_store(server.url, ttl_s=0) as store, server.make_client() as client:
        store.put(name(1), [b"content"])
        assert store.get(name(1)) == b"content"
        store.touch(name(1))
        assert client.ttl(f"sensorium:{name(1)}") == -1
        assert store.statistics().num_errors == 0


def test_what_is_too_large_is_not_sent(
    store: tested.RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tested, "MAX_ENTRY_BYTES", 1000)
    assert not store.put(name(1), [bytes(500), bytes(437)])
    assert store.statistics().num_oversize == 1
    assert not store.has(name(1))
    assert store.put(name(2), [bytes(500), bytes(436)])
    assert store.get(name(2)) == bytes(936)


def test_redis_itself_makes_room(server: RedisServer, store: tested.RedisStore) -> None:
    with server.make_client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", str(8 * 2**20))
        for number in range(40):
            assert store.put(name(number), [bytes([number]) * 500_000])
        found = [store.get(name(number)) for number in range(40)]
        assert client.info("memory")["used_memory"] <= 9 * 2**20
    assert found[-1] is not None
    assert None in found
    assert all(each in (None, bytes([n]) * 500_000) for n, each in enumerate(found))
    assert (store.statistics().num_errors, store.statistics().num_damaged) == (0, 0)


@pytest.mark.usefixtures("long_pauses")
def test_a_full_redis_that_evicts_nothing_is_still_read(
    server: RedisServer, store: tested.RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.put(name(1), [b"content"])
    with server.make_client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        assert not store.put(name(2), [bytes(100_000)])
        for number in range(3, 6):
            assert store.has(name(number)), "nothing need be prepared for it"
            assert not store.put(name(number), [bytes(100_000)])
        assert store.get(name(1)) == b"content"
        assert store.statistics().num_errors == 1, "it was left alone after the first"
        client.config_set("maxmemory", "0")
    store._room._retry_at = 0.0
    assert store.put(name(2), [bytes(100_000)])
    lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "takes no entries: its memory is used up. It is still read." in lines[0]


@pytest.mark.usefixtures("long_pauses")
def test_a_redis_that_can_only_be_read_is_read(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    for change in (
        lambda store: store.put(name(2), [b"content"]),
        lambda store: store.touch(name(1)),
        lambda store: store.remove(name(1)),
    ):
        with open_store(server.url) as store, server.make_client() as client:
            client.replicaof("NO", "ONE")
            store.put(name(1), [b"content"])
            client.replicaof("127.0.0.1", "1")
            for _ in range(3):
                assert not change(store)
                assert store.get(name(1)) == b"content"
            assert store.statistics().num_errors == 1
    lines = get_lines(caplog)
    assert len(lines) == 3
    assert all("takes no entries: it can only be read. It is still read." in e for e in lines)


def test_a_user_without_rights_is_a_failure_in_words(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with server.make_client() as client:
        client.execute_command("ACL", "SETUSER", "guest", "on", ">hunter2", "~other:*", "+@all")
    with open_store(f"unix://guest:hunter2@{server.socket}") as store:
        assert store.get(name(1)) is None
        assert not store.put(name(1), [b"content"])
    (line,) = get_lines(caplog)
    assert "it does not permit that to this user" in line
    assert "hunter2" not in caplog.text


WRITER = """
import sys
from sensorium.multimodal.tiers.address import parse_address
from sensorium.multimodal.tiers.redis import RedisStore
store = RedisStore(parse_address(sys.argv[1]), ttl_s=1000, patience_s=60.0)
num_new = 0
for number in range(100):
    num_new += store.put(f"{number:064x}.layout-v1", [bytes([number]) * 100_000])
    assert store.get(f"{number:064x}.layout-v1") == bytes([number]) * 100_000
counts = store.statistics()
assert not counts.num_damaged + counts.num_errors
print(num_new)
store.close()
"""


def test_several_writers_of_the_same_entries_write_each_once(server: RedisServer) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, server.url], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    outputs = [writer.communicate()[0] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert sum(map(int, outputs)) == 100


def test_threads_share_a_store(store: tested.RedisStore) -> None:
    problems: list[object] = []

    def use(first: int) -> None:
        for number in range(first, first + 30):
            store.put(name(number), [bytes([number]) * 10_000])
            if store.get(name(number)) != bytes([number]) * 10_000:
                problems.append(number)

    threads = [threading.Thread(target=use, args=(first,)) for first in (0, 10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert store.statistics().num_queries == 120
    assert store.statistics().num_writes == 60


# ---- servers that fail


def get_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = ("sensorium.multimodal.tiers.breaker", "sensorium.multimodal.tiers.redis")
    return [record.message for record in caplog.records if record.name in own]


def test_a_killed_server_is_missed_once_and_found_again(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with open_store(server.url) as store:
        store.put(name(1), [b"content"])
        server.kill()
        for _ in range(3):
            assert store.get(name(1)) is None
            assert not store.put(name(2), [b"more"])
            store.touch(name(1))
            store.remove(name(1))
        assert store.statistics().num_errors >= 1
        server.start()
        wait_until(lambda: store.put(name(1), [b"content"]), "the store is used again")
        assert store.get(name(1)) == b"content"
    started, gone, back = get_lines(caplog)
    assert started == f"media is also kept in the remote cache at {server.url}"
    assert gone.endswith(
        "fails: it can't be reached, or closes the connection. Requests continue without it."
    )
    assert back.endswith("is back")


def test_a_server_that_was_restarted_meanwhile_is_no_failure(server: RedisServer) -> None:
    with open_store(server.url) as store:
        store.put(name(1), [b"content"])
        server.kill()
        server.start()
        assert store.get(name(1)) is None
        assert store.put(name(1), [b"content"])
        assert store.statistics().num_errors == 0


@pytest.mark.usefixtures("long_pauses")
def test_a_server_that_hangs_is_not_waited_for_twice(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(server.url) as store:
        assert store.put(name(1), [b"content"])
        caplog.clear()
        server.hang()
        store._patience_s = SHORT_S
        results = [store.get(name(1)) for _ in range(200)]
        assert results == [None] * 200
        assert not store.put(name(2), [b"more"])
        assert store.statistics().num_errors == 1
        server.go_on()
        (line,) = get_lines(caplog)
        assert "it does not answer in time" in line
        store._server._retry_at = 0.0
        store._patience_s = LONG_S
        assert store.get(name(1)) == b"content"


def test_a_server_that_hangs_while_it_takes_an_entry_stops_only_writing(
    server: RedisServer, store: tested.RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(name(1), [b"content"])
    monkeypatch.setattr(tested, "_WRITE_S", SHORT_S)
    original = store._write

    def hang_and_write(key: str, value: bytes) -> bool:
        server.hang()
        return original(key, value)

    monkeypatch.setattr(store, "_write", hang_and_write)
    assert not store.put(name(2), [b"x" * 10_000_000])
    server.go_on()
    assert store.get(name(1)) == b"content"
    assert store.statistics().num_errors == 1


def test_a_server_that_comes_later_is_used_then(caplog: pytest.LogCaptureFixture) -> None:
    with run_redis() as server:
        server.kill()
        with open_store(server.url) as store:
            (line,) = get_lines(caplog)
            assert "it can't be reached" in line
            assert store.get(name(1)) is None
            server.start()
            wait_until(lambda: store.put(name(1), [b"content"]), "the store is used")


def test_a_wrong_password_is_a_failure_that_shows_no_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with run_redis("--requirepass", "right-hunter2") as server:
        for url in (f"{server.url}?password=wrong-hunter2", server.url):
            with open_store(url) as store:
                assert store.get(name(1)) is None
                assert not store.put(name(1), [b"content"])
                assert store.statistics().num_errors >= 1
        with open_store(f"unix://:right-hunter2@{server.socket}") as store:
            assert store.put(name(1), [b"content"])
            assert store.get(name(1)) == b"content"
    lines = get_lines(caplog)
    assert len(lines) == 3
    assert "it refuses the user or the password" in lines[0]
    assert "it refuses the user or the password" in lines[1]
    assert "hunter2" not in caplog.text


@contextmanager
def serve_nonsense(answer: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """Listen at a port, and let a function answer to what comes in each connection."""
    is_over = threading.Event()

    def handle(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while received := connection.recv(2**16):
                answer(connection, received)

    def accept(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            if is_over.is_set():
                return connection.close()
            threading.Thread(target=handle, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, args=(listener,))
        thread.start()
        address = listener.getsockname()
        yield f"redis://:hunter2@127.0.0.1:{address[1]}/0"
        is_over.set()
        socket.create_connection(address).close()
        thread.join()


def flood(connection: socket.socket, received: bytes) -> None:  # noqa: ARG001
    while True:
        connection.sendall(b"+" * 2**16)


def drip(connection: socket.socket, received: bytes) -> None:  # noqa: ARG001
    while True:
        connection.sendall(b"+")
        threading.Event().wait(SHORT_S / 10)


NONSENSE: dict[str, Callable[[socket.socket, bytes], None]] = {
    "HTTP": lambda c, _: c.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
    "an echo": lambda c, received: c.sendall(received),
    "a relative of Redis, which repeats what it does not know": lambda c, received: c.sendall(
        b"-ERR unknown command, with args beginning with: " + received.split()[-1] + b"\r\n"
    ),
    "an endless line": flood,
    "a dripping line": drip,
    "a huge length": lambda c, _: c.sendall(b"$99999999999999\r\n"),
    "a negative length": lambda c, _: c.sendall(b"$-7\r\n"),
    "no number": lambda c, _: c.sendall(b"$seven\r\n"),
    "deep lists": lambda c, _: c.sendall(b"*1\r\n" * 5000),
    "the end": lambda c, _: c.close(),
    "nothing": lambda *_: None,
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_server_that_is_no_redis_costs_nothing_but_its_entries(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    before = set(threading.enumerate())  # threads of another test may still wait for a hung Redis
    with serve_nonsense(NONSENSE[kind]) as url, open_store(url, patience_s=SHORT_S) as store:
        for _ in range(3):
            assert store.get(name(1)) is None
            assert not store.put(name(1), [b"content"])
            store._server._retry_at = 0.0
        assert store.statistics().num_errors >= 3
        assert store.statistics().num_writes == 0
        wait_until(
            lambda: not any(t.name == "redis" for t in set(threading.enumerate()) - before),
            "all threads of the store have ended",
        )
    assert len(get_lines(caplog)) == 1
    assert "hunter2" not in caplog.text


def test_a_failed_call_is_not_repeated() -> None:
    """The caller waits, and a breaker decides when Redis is asked again."""
    calls: list[bytes] = []

    def hang_up(connection: socket.socket, received: bytes) -> None:
        calls.append(received)
        connection.close()

    with serve_nonsense(hang_up) as url, open_store(url) as store:
        for number in range(1, 4):
            assert store.statistics().num_errors == len(calls) == number
            store._server._retry_at = 0.0
            assert store.get(name(1)) is None


# ---- other ways to connect


def get_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_a_server_at_a_port_is_used() -> None:
    port = get_free_port()
    with (
        run_redis("--port", str(port), "--bind", "127.0.0.1"),
        open_store(f"redis://127.0.0.1:{port}/0") as store,
    ):
        assert store.put(name(1), LARGE)
        assert store.get(name(1)) == b"".join(LARGE)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no certificate can be made here: {error}")
    return key, certificate


def test_a_server_with_tls_is_used_if_its_certificate_is_trusted(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path)
    port = get_free_port()
    flags = ("--tls-port", str(port), "--bind", "127.0.0.1", "--tls-auth-clients", "no")
    files = ("--tls-key-file", str(key), "--tls-cert-file", str(certificate))
    url = f"rediss://127.0.0.1:{port}/0"
    with run_redis(*flags, *files):
        with open_store(f"{url}?ssl_ca_certs={certificate}") as store:
            assert store.put(name(1), LARGE)
            assert store.get(name(1)) == b"".join(LARGE)
        with open_store(url) as store:
            assert store.get(name(1)) is None
            assert store.statistics().num_errors >= 1
