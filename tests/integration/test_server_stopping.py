"""A server that is stopped, or loses its parent, ends as promised.

Nothing that it had is left on the machine.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.fault_load import (
    Crowd,
    Reply,
    ask,
    make_body,
    make_image_url,
    open_raw,
)
from tests.integration.media_hosts import MediaServer
from tests.support.server import ROOT, ServerProcess, get_command, is_alive, kill
from tests.support.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.xdist_group("server-stopping")
LONG = 3900  # no machine is so fast that it ends before something has happened to it
Start = Callable[..., ServerProcess]


@pytest.fixture
def folder() -> Iterator[Path]:
    """The servers' own place for temporary files, to see what is left in it."""
    folder = Path(tempfile.mkdtemp(prefix="st-"))  # pytest's own are too long for sockets
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start(folder: Path, tiny_model: Callable[[str], str]) -> Iterator[Start]:
    servers: list[ServerProcess] = []

    def make(*flags: str, model: str | None = None, is_ready: bool = True) -> ServerProcess:
        flags = ("--max-model-len", "4096", "--mm-processor-pool-size", "0", *flags)
        server = ServerProcess(model or tiny_model("qwen2_5_vl"), *flags, TMPDIR=str(folder))
        servers.append(server)
        if is_ready:
            server.wait_until_ready()
        return server

    yield make
    for server in servers:
        if server.process.poll() is None:
            server.kill()


def check_nothing_is_left(pids: list[int], folder: Path) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), "all processes have ended")
    wait_until(lambda: not list(folder.iterdir()), f"{list(folder.rglob('*'))} is removed")
    users = [path for path in Path("/proc").glob("[0-9]*") if str(folder) in read_environment(path)]
    assert not [get_command(int(path.name)) for path in users]


def read_environment(process: Path) -> str:
    try:
        return (process / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def get_address(server: ServerProcess) -> tuple[str, int]:
    host, _, port = server.get_url().removeprefix("http://").partition(":")
    return host, int(port)


def is_refused(server: ServerProcess) -> bool:
    try:
        socket.create_connection(get_address(server)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_sigterm_lets_requests_end_and_takes_no_new_ones(start: Start, folder: Path) -> None:
    server = start("--api-server-count", "2", "--shutdown-timeout", "120")
    pids = server.get_process_ids()

    async def stop() -> list[Reply]:
        bodies = [
            make_body(f"tale {i}", make_image_url(i), max_tokens=200, stream=bool(i % 2))
            for i in range(6)
        ]
        crowd = Crowd(server, bodies)
        await crowd.wait_until_taken()
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: is_refused(server), "it refuses connections")
        return await crowd.finish()

    replies = asyncio.run(stop())
    assert all(reply.is_good for reply in replies), (replies, server.output)
    assert server.wait() == 0
    assert "Traceback" not in server.output
    check_nothing_is_left(pids, folder)


@pytest.mark.slow
def test_requests_that_are_not_done_in_time_end_with_an_error(
    start: Start, folder: Path, silent_host: MediaServer
) -> None:
    """A stream ends with an event, a whole answer with its status.

    So do requests that are still being prepared, or that arrive slowly. SIGINT does the same.
    """
    flags = ("--allow-private-media-addresses", "--media-deadline", "3600")
    server = start("--shutdown-timeout", "0.5", *flags)
    pids = server.get_process_ids()
    image = f"http://127.0.0.1:{silent_host.port}/0.png"

    async def stop() -> tuple[list[Reply], bytes]:
        bodies = [make_body(f"epic {i}", max_tokens=LONG, stream=bool(i % 2)) for i in range(16)]
        crowd = Crowd(server, [*bodies, make_body("see", image)])
        await crowd.wait_until_streaming()
        await crowd.wait_until_running(16)
        reader, writer = await open_raw(server, b"{", announced=100)
        await wait_until_async(lambda: bool(silent_host.visits), "the image is asked for")
        os.killpg(server.process.pid, signal.SIGINT)
        replies, answer = await crowd.finish(), await reader.read()
        writer.close()
        return replies, answer

    replies, answer = asyncio.run(stop())
    assert server.wait() == 0, server.output
    assert answer.startswith(b"HTTP/1.1 503"), answer
    assert [reply.status for reply in replies] == [*[503, 200] * 8, 503], replies
    assert all(reply.is_whole and reply.error for reply in replies), replies
    assert {reply.error["message"] for reply in replies if reply.error} == {
        "the server is stopping: try again later"
    }
    assert "Traceback" not in server.output, server.output
    check_nothing_is_left(pids, folder)


@pytest.mark.slow
def test_a_second_signal_stops_at_once(start: Start, folder: Path) -> None:
    server = start("--shutdown-timeout", "3600")
    pids = server.get_process_ids()

    async def stop() -> list[Reply]:
        crowd = Crowd(server, [make_body("endless", max_tokens=LONG, stream=True)] * 2)
        await crowd.wait_until_streaming()
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: is_refused(server), "it refuses connections")
        server.process.send_signal(signal.SIGTERM)
        second = time.monotonic()
        await asyncio.to_thread(server.process.wait, 60)
        print(f"ended {time.monotonic() - second:.2f} s after the second signal")
        return await crowd.finish()

    replies = asyncio.run(stop())
    assert server.wait() == 128 + signal.SIGTERM
    assert not any(reply.is_whole for reply in replies)
    check_nothing_is_left(pids, folder)


@pytest.mark.slow
def test_a_server_can_be_stopped_while_it_starts(start: Start, folder: Path) -> None:
    server = start(is_ready=False)
    wait_until(lambda: bool(server.find_children("core_main")), "the core is started")
    pids = server.get_process_ids()
    assert server.stop() == 0
    assert "Traceback" not in server.output
    check_nothing_is_left(pids, folder)


def test_all_processes_end_with_a_killed_parent_and_another_server_lives(
    start: Start, folder: Path, omni_server: ServerProcess
) -> None:
    """The other server is another one of this machine, with work of its own."""
    server = start("--api-server-count", "2")
    pids = server.get_process_ids()
    (private,) = folder.iterdir()
    assert private.stat().st_mode & 0o777 == 0o700

    async def lose() -> tuple[list[Reply], list[Reply]]:
        bodies = [
            make_body(f"end {i}", make_image_url(i), max_tokens=LONG, stream=bool(i % 2))
            for i in range(4)
        ]
        crowd = Crowd(server, bodies)
        other = Crowd(omni_server, [{**body, "max_tokens": 200} for body in bodies])
        await other.wait_until_streaming()
        await crowd.wait_until_running(4)
        kill(server.process.pid)
        return await crowd.finish(), await other.finish()

    replies, others = asyncio.run(lose())
    assert not any(reply.is_good for reply in replies)
    assert all(reply.is_good for reply in others)
    server.wait()
    check_nothing_is_left(pids, folder)


@pytest.mark.slow
def test_a_server_with_a_closed_output_serves_and_can_be_stopped(
    folder: Path, tiny_model: Callable[[str], str]
) -> None:
    """The reader of the log is gone: requests are served, and a signal still ends the server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", "from sensorium.cli import main; main()"),
            *("serve", tiny_model("qwen2_5_vl"), "--max-model-len", "1024", "--port", str(port)),
            *("--mm-processor-pool-size", "0"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(folder)},
        start_new_session=True,
    )
    if process.stdout is not None:
        process.stdout.close()
    try:
        server = Remote(f"http://127.0.0.1:{port}")
        wait_until(lambda: server.is_healthy() or process.poll() is not None, "it serves", 240)
        assert ask(server, make_body("hello", make_image_url(1))).is_good
        process.terminate()
        assert process.wait(60) == 0, process.returncode
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(30)
    check_nothing_is_left([process.pid], folder)


class Remote(ServerProcess):
    """A server that is known by its address alone."""

    def __init__(self, url: str) -> None:
        self.url = url

    def is_healthy(self) -> bool:
        try:
            return self.get("/health").status_code == 200
        except httpx.TransportError:
            return False
