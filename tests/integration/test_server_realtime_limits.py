"""Live sessions of a server with two frontends, and of one that can't wait for them to end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from sensorium.embedded import EMBEDDED_MODEL
from tests.integration.speaking import speak
from tests.support.server import START_TIMEOUT_S, ServerProcess, kill, serve
from tests.support.talking import RATE, Talker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-realtime-limits")
OPENAI = "?intent=transcription"
FAILED = "conversation.item.input_audio_transcription.failed"
LIMIT = 3
NUM_LOOKS = 8  # new connections: each frontend takes some
NUM_TRIES = 30
SHUTDOWN_S = 3.0


def begin(server: ServerProcess) -> Talker:
    talker = Talker(server.get_url(), OPENAI)
    talker.receive()
    return talker


def try_session(server: ServerProcess) -> int | None:
    """Open a session and close it. Return the status if it is refused, or `None`."""
    try:
        begin(server).socket.close()
    except InvalidStatus as error:
        return error.response.status_code
    return None


def is_free(server: ServerProcess) -> bool:
    try:
        return try_session(server) is None
    except (OSError, WebSocketException):
        return False  # no frontend listens yet


def find_owner(talker: Talker, pids: list[int]) -> int:
    """Return which of these processes has the other end of a connection."""
    port = talker.socket.socket.getsockname()[1]
    inodes = {
        fields[9]
        for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
        if int(fields[2].rpartition(":")[2], 16) == port
    }
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(entry) in {f"socket:[{inode}]" for inode in inodes}:
                return pid
    raise AssertionError("no frontend has this connection")


def begin_in_both(stack: ExitStack, server: ServerProcess) -> list[int]:
    """Open as many sessions as may be, in both frontends, and return the frontends of all."""
    pids = server.find_children("frontend_main")
    owners: list[int] = []
    for _ in range(NUM_TRIES):
        talker = begin(server)
        owner = find_owner(talker, pids)
        if len(owners) == LIMIT - 1 and set(owners) == {owner}:
            talker.socket.close()  # the last one has to be in the other frontend
            wait_until(lambda: count_active(server) == LIMIT - 1, "it has ended")
            continue
        stack.enter_context(talker)
        owners.append(owner)
        if len(owners) == LIMIT:
            return owners
    raise AssertionError(f"one frontend takes all connections: {owners}")


def count_active(server: ServerProcess) -> float:
    return server.get_metrics()["sensorium:realtime_sessions_active"]


def test_all_frontends_count_their_sessions_together() -> None:
    flags = ("--api-server-count", "2", "--max-realtime-sessions", str(LIMIT))
    with serve(EMBEDDED_MODEL, *flags) as server:
        with ExitStack() as stack:
            owners = begin_in_both(stack, server)
            assert len(set(owners)) == 2
            assert [try_session(server) for _ in range(NUM_LOOKS)] == [429] * NUM_LOOKS
        wait_until(lambda: count_active(server) == 0, "sessions that have ended still count")
        with ExitStack() as stack:
            owners = begin_in_both(stack, server)
            assert try_session(server) == 429
            kill(owners[0])
            # The sessions of the frontend that was killed have ended with it.
            wait_until(lambda: is_free(server), "killed sessions count", START_TIMEOUT_S)


def test_a_session_that_outlasts_the_shutdown_timeout_is_closed_on_time() -> None:
    with (
        serve(EMBEDDED_MODEL, "--shutdown-timeout", str(SHUTDOWN_S)) as server,
        begin(server) as talker,
    ):
        assert talker.set_input(format={"type": "audio/pcm", "rate": RATE})["type"] != "error"
        (core,) = server.find_children("core_main")
        os.kill(core, signal.SIGSTOP)  # the model never answers
        talker.say(speak("speech", "question"))
        talker.receive_until("conversation.item.done")
        assert isinstance(server.process.pid, int)
        began = time.monotonic()
        os.kill(server.process.pid, signal.SIGTERM)
        messages = talker.receive_until("error")
        assert time.monotonic() - began >= SHUTDOWN_S - 0.5
        failed = [each["error"] for each in messages if each["type"] == FAILED]
        assert len(failed) == 2  # each turn, also the one that waits
        assert all("stopping" in error["message"] for error in failed), failed
        assert messages[-1]["error"]["code"] == "session_draining"
        with pytest.raises(ConnectionClosed) as caught:
            talker.receive()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1012
        os.kill(core, signal.SIGCONT)
        assert server.wait() == 0
        with pytest.raises(httpx.TransportError):
            server.get("/health")
