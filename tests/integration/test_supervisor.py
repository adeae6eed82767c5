"""The parent keeps its processes up, ends them, and leaves nothing behind.

Its children are real processes that speak the real protocol, but load no model.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sensorium import __version__
from sensorium.server.metrics.shared_files import Files, Values
from tests.integration.supervised import Supervised, is_alive
from tests.support.waiting import wait_until


@pytest.fixture
def server() -> Iterator[Supervised]:
    folder = Path(tempfile.mkdtemp(prefix="sv-"))  # pytest's own are too long for sockets
    supervised = Supervised(folder)
    yield supervised
    supervised.clean_up()
    shutil.rmtree(folder)


def get_address(ready_line: str) -> tuple[str, int]:
    url = ready_line.removeprefix("Sensorium is ready: http://").split()[0]
    host, _, port = url.partition(":")
    return host, int(port)


def test_the_server_prints_its_settings_and_then_its_address(server: Supervised) -> None:
    server.start(api_server_count=2, media={"mm_processor_cache_gb": 0})
    first, *rows, last = server.read_until_ready()
    assert first.split() == ["Sensorium", f"{__version__}:", "loading", "a-model"]
    assert [row.split(maxsplit=1) for row in rows[:1]] == [["model", "a-model"]]
    assert any(row.split() == ["processor", "cache", "off"] for row in rows)
    with socket.create_connection(get_address(last)):
        pass
    assert len(server.get_events(event="serves")) == 2


def test_the_json_log_has_the_same_entries(server: Supervised) -> None:
    server.start(log_format="json")
    wait_until(lambda: "is ready: http" in server.get_stderr())
    lines = [json.loads(line) for line in server.get_stderr().splitlines()]
    assert lines[1]["engine"]["KV cache"] == "9 blocks"
    assert lines[-1]["url"].startswith("http://127.0.0.1:")
    assert {line["process"] for line in lines} == {"parent"}


def test_a_core_that_dies_is_replaced_and_every_frontend_is_notified_of_both(
    server: Supervised,
) -> None:
    server.start(api_server_count=2, media={"mm_processor_cache_gb": 0})
    server.read_until_ready()
    core = server.get_events("core-1", "StartCore")[0]
    private = Path(core["socket_dir"])
    assert Values(Files(private / "metrics")).get("vllm:num_requests_running") == 1
    os.kill(core["pid"], signal.SIGKILL)
    wait_until(lambda: len(server.get_events("f", "CoreUp")) == 4)
    for identity in ("f0-1", "f1-1"):
        received = server.get_events(identity, "Core")
        assert [event["event"] for event in received] == ["CoreUp", "CoreDown", "CoreUp"]
        assert received[-1]["endpoint"] == f"ipc://{private}/core-2.sock"
    assert not is_alive(core["pid"])
    assert {path.name for path in private.glob("*.sock")} == {"core-2.sock"}
    assert len(server.get_child_ids()) == 4
    values = Values(Files(private / "metrics"))
    assert values.get("vllm:num_requests_running") == 0
    assert values.get("sensorium:process_restarts_total", kind="core") == 1


def test_a_frontend_that_dies_is_replaced_and_the_core_is_notified(server: Supervised) -> None:
    server.start(api_server_count=2, media={"mm_processor_cache_gb": 0})
    server.read_until_ready()
    os.kill(server.get_events("f1-1", "StartFrontend")[0]["pid"], signal.SIGKILL)
    server.wait_for_event("f1-2", "serves")
    assert server.wait_for_event("core-1", "FrontendGone")["identity"] == "f1-1"
    assert not server.get_events("f0-2")
    assert not server.get_events("core-2")


@pytest.mark.parametrize("is_ready", [False, True])
def test_children_end_with_a_parent_that_was_killed(server: Supervised, is_ready: bool) -> None:
    """Also while they compute, or have not started yet; and they remove what it had."""
    server.behave("core", "busy 1", *([] if is_ready else ["hang 1"]))
    server.behave("frontend", "busy 1")
    server.start()
    if is_ready:
        server.read_until_ready()
    server.wait_for_event("f0-1", "StartFrontend")
    server.wait_for_event("core-1", "StartCore")
    server.parent.kill()
    server.end()
    server.check_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_frontends_first_and_stops_the_core_last(
    server: Supervised, number: signal.Signals
) -> None:
    server.start(api_server_count=2, media={"mm_processor_cache_gb": 0})
    address = get_address(server.read_until_ready()[-1])
    server.parent.send_signal(number)
    assert server.end() == 0, server.get_stderr()
    ends = [event["event"] for event in server.get_events() if event["event"] in ("Drain", "Stop")]
    assert ends == ["Drain", "Drain", "Stop"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    server.check_nothing_is_left()


def test_a_process_that_does_not_drain_in_time_is_killed(server: Supervised) -> None:
    server.behave("frontend", "deaf 1")
    server.start(shutdown_timeout=0.1, grace_s=5.0)
    server.read_until_ready()
    server.parent.terminate()
    assert server.end() == 0
    assert server.get_events("core-1", "Stop")
    server.check_nothing_is_left()


def test_a_second_signal_kills_at_once(server: Supervised) -> None:
    server.behave("frontend", "deaf 1")
    server.behave("core", "deaf 1")
    server.start(shutdown_timeout=3600)
    server.read_until_ready()
    server.parent.terminate()
    server.wait_for_event("f0-1", "Drain")
    server.parent.terminate()
    assert server.end() == 128 + signal.SIGTERM
    server.check_nothing_is_left()


def test_signals_to_children_change_nothing(server: Supervised) -> None:
    """A service manager sends them to every process of a group."""
    server.start()
    server.read_until_ready()
    for process_id in server.get_child_ids():
        os.kill(process_id, signal.SIGTERM)
        os.kill(process_id, signal.SIGINT)
    server.parent.terminate()
    assert server.end() == 0
    assert len(server.get_child_ids()) == 2
    assert server.get_events("f0-1", "Drain")


def test_a_server_can_be_stopped_while_it_starts(server: Supervised) -> None:
    server.behave("core", "hang 1")
    server.start()
    server.wait_for_event("core-1", "StartCore")
    server.wait_for_event("f0-1", "StartFrontend")
    server.parent.terminate()
    assert server.end() == 0
    server.check_nothing_is_left()


@pytest.mark.parametrize("kind", ["core", "frontend"])
def test_a_process_that_can_not_start_ends_the_server_with_the_reason(
    server: Supervised, kind: str
) -> None:
    server.behave(kind, "fail 1")
    server.start()
    assert server.end() == 1
    assert server.get_stderr().splitlines()[-1] == "sensorium: this model is only a name"
    server.check_nothing_is_left()


def test_a_process_killed_at_the_start_is_reported_by_its_signal(server: Supervised) -> None:
    server.behave("core", "die 1")
    server.start()
    assert server.end() == 1
    assert "the process of core ended with signal SIGKILL" in server.get_stderr()
    server.check_nothing_is_left()


@pytest.mark.parametrize("kind", ["core", "frontend"])
def test_a_process_that_always_dies_is_given_up(server: Supervised, kind: str) -> None:
    server.behave(kind, "fail 2")
    server.start()
    server.read_until_ready()
    os.kill(server.get_events(kind[0], "Start")[0]["pid"], signal.SIGKILL)
    assert server.end() == 1
    last = server.get_stderr().splitlines()[-1]
    assert "5 times in a row" in last
    assert "this model is only a name" in last
    assert len(server.get_events(kind[0], "Start")) == 6
    server.check_nothing_is_left()


def test_a_port_that_is_taken_is_an_error_before_anything_starts(server: Supervised) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server.start(port=port)
        assert server.end() == 1
    assert f"port {port}: Address already in use" in server.get_stderr()
    assert not server.get_events()
    server.check_nothing_is_left()


def test_shared_memory_is_reserved_once_and_inherited_by_every_core(server: Supervised) -> None:
    media = {"mm_processor_cache_type": "shm", "mm_processor_cache_gb": 1 / 1024}
    server.start(api_server_count=2, media=media)
    server.read_until_ready()
    first = server.get_events("core-1", "StartCore")[0]
    assert first["shm_bytes"] > 2**20
    os.kill(first["pid"], signal.SIGKILL)
    assert server.wait_for_event("core-2", "StartCore")["shm_bytes"] == first["shm_bytes"]


def test_too_little_memory_is_an_error_before_anything_starts(server: Supervised) -> None:
    server.start(media={"mm_processor_cache_type": "shm", "mm_processor_cache_gb": 2**19})
    assert server.end() == 1
    assert "the shared-memory cache can't reserve" in server.get_stderr()
    assert not server.get_events()


def test_a_server_that_only_renders_has_no_core(server: Supervised) -> None:
    server.start(api_server_count=2, is_render_only=True)
    _, *rows, last = server.read_until_ready()
    assert rows[0].split() == ["engine", "none"]
    assert any(row.split(maxsplit=2)[2:] == ["4 GiB, in each frontend"] for row in rows)
    with socket.create_connection(get_address(last)):
        pass
    os.kill(server.get_events("f1-1", "StartFrontend")[0]["pid"], signal.SIGKILL)
    server.wait_for_event("f1-2", "serves")
    server.parent.terminate()
    assert server.end() == 0, server.get_stderr()
    assert not server.get_events("core")
    assert {event["who"] for event in server.get_events(event="Drain")} == {"f0-1", "f1-2"}
    server.check_nothing_is_left()
