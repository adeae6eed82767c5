"""The server of `sensorium render`: frontends alone, on a checkpoint without weights."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.support.server import (
    POOL,
    START_TIMEOUT_S,
    ServerProcess,
    get_command,
    get_descendants,
    is_alive,
    kill,
    serve,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-render")
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def weightless(tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's small files."""
    return Path(
        shutil.copytree(
            tiny_model("qwen2_5_omni"),
            tmp_path_factory.mktemp("weightless") / "model",
            ignore=shutil.ignore_patterns("*.safetensors"),
        )
    )


@pytest.fixture(scope="module")
def server(weightless: Path) -> Iterator[ServerProcess]:
    flags = ("--served-model-name", "omni", "--max-model-len", "1234", "--api-server-count", "2")
    with serve(str(weightless), *flags, *POOL, command="render") as running:
        # Before other tests have requests counted and frontends killed.
        check_warm_ups(running)
        yield running


def check_warm_ups(server: ServerProcess) -> None:
    """Every frontend has warmed up, and counts none of it."""
    for line in (": Multi-modal warmup completed in", ": Readonly multi-modal warmup completed in"):
        assert server.output.count(line) == 2
    metrics = server.get_metrics()
    counted = {name: value for name, value in metrics.items() if "queries" in name and value}
    assert counted == {}
    assert metrics['sensorium:media_bytes_total{source="data"}'] == 0


def test_a_render_server_is_ready_without_weights_and_describes_itself(
    server: ServerProcess,
) -> None:
    assert "none: this server renders, and loads no weights" in server.output
    assert server.get("/health").status_code == 200
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("omni", 1234)
    assert model["modalities"] == ["text", "image", "video", "audio"]
    assert model["switched_off"] == {}
    assert model["capabilities"] == []


def test_routes_that_generate_are_refused(server: ServerProcess) -> None:
    response = server.post("/v1/chat/completions", CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "render_only")
    page = server.get("/")
    assert (page.status_code, page.json()["error"]["code"]) == (404, "render_only")


def test_caches_can_be_reset(server: ServerProcess) -> None:
    assert server.post("/reset_mm_cache").status_code == 200


def test_a_render_server_has_no_core(server: ServerProcess) -> None:
    commands = [get_command(pid) for pid in get_descendants(server.process.pid)]
    assert sum("frontend_main" in command for command in commands) == 2
    assert not any("core_main" in command for command in commands)


def test_a_frontend_that_dies_is_replaced(server: ServerProcess) -> None:
    first, _ = server.find_children("frontend_main")
    kill(first)
    wait_until(lambda: not is_alive(first), "the frontend has ended")
    server.wait_for_output("serves again", START_TIMEOUT_S)
    assert len(server.find_children("frontend_main")) == 2
    assert server.get("/health").status_code == 200


def list_open_files(process_id: int) -> list[str]:
    names = []
    for path in Path(f"/proc/{process_id}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(path))
    return names


@pytest.mark.slow
def test_existing_weights_are_not_opened(tiny_model: Callable[[str], str]) -> None:
    """The server also ends on a signal, with nothing left."""
    with serve(tiny_model("qwen2_5_omni"), command="render") as running:
        process_ids = running.get_process_ids()
        for process_id in process_ids:
            assert ".safetensors" not in Path(f"/proc/{process_id}/maps").read_text()
            assert not any(name.endswith(".safetensors") for name in list_open_files(process_id))
        url = running.get_url("/ping")
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
    wait_until(lambda: not any(map(is_alive, process_ids)), "its processes have ended")
