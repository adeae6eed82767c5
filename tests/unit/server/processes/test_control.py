"""Messages between parent and child over a real pair of sockets."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from sensorium.engine.assembly.options import LoadingOptions, MediaOptions
from sensorium.engine.core_process import CoreInfo
from sensorium.server.options import ServeOptions
from sensorium.server.processes.control import (
    FROM_CHILD,
    TO_CORE,
    TO_FRONTEND,
    Channel,
    CoreDown,
    CoreReady,
    CoreUp,
    Drain,
    Failed,
    FrontendGone,
    Serving,
    StartCore,
    StartFrontend,
    Stop,
    encode_line,
)
from sensorium.types.sampling import GenerationDefaults, TokenBans

OPTIONS = ServeOptions(
    loading=LoadingOptions(model="m"),
    api_key=("k",),
    media=MediaOptions(mm_processor_kwargs={"a": [1, None]}),
)
INFO = CoreInfo(
    endpoint="ipc:///x",
    max_model_len=9,
    defaults=GenerationDefaults(eos_token_ids=(1, 2), bans=TokenBans(sequences=((3, 4), (5,)))),
    description=(("model", "a\nb"),),
)
START_CORE = StartCore(options=OPTIONS, socket_dir="/d", life=2, shm_fd=7)
START_FRONTEND = StartFrontend(
    options=OPTIONS, index=0, identity="f0-1", listen_fd=3, counts_fd=4, socket_dir="/d"
)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    ("decoder", "messages"),
    [
        (TO_CORE, [START_CORE, FrontendGone("f1-1"), Stop()]),
        (TO_FRONTEND, [START_FRONTEND, CoreUp(INFO), CoreDown("why\nso"), Drain()]),
    ],
)
def test_children_read_what_was_sent(
    ends: tuple[socket.socket, socket.socket], decoder: Any, messages: list[Any]
) -> None:
    ends[0].sendall(b"".join(map(encode_line, messages)))
    channel = Channel(ends[1], decoder)
    assert [channel.receive() for _ in messages] == messages


@pytest.mark.parametrize("message", [CoreReady(INFO), Serving(), Failed("a\nb")])
def test_the_parent_reads_what_a_child_sends(
    ends: tuple[socket.socket, socket.socket], message: Any
) -> None:
    Channel(ends[1], TO_CORE).send(message)
    line = ends[0].recv(65_536)
    assert line.count(b"\n") == 1
    assert FROM_CHILD.decode(line) == message


def test_each_restart_of_the_core_has_another_endpoint() -> None:
    assert START_CORE.endpoint == "ipc:///d/core-2.sock"


def test_a_reader_gets_each_message_however_it_is_cut_and_then_the_end(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    got: queue.SimpleQueue[Any] = queue.SimpleQueue()
    Channel(ends[1], TO_CORE).start_reading(
        got.put, on_end=lambda: got.put("end"), on_failure=lambda: got.put("failure")
    )
    line = encode_line(FrontendGone("x" * 100)) + encode_line(Stop())
    for byte in range(0, len(line), 7):
        ends[0].sendall(line[byte : byte + 7])
    assert got.get(timeout=120) == FrontendGone("x" * 100)
    assert got.get(timeout=120) == Stop()
    ends[0].close()
    assert got.get(timeout=120) == "end"


def fail(message: object) -> None:
    raise RuntimeError(f"{message} is too much")


@pytest.mark.parametrize("line", [b'{"type": "Nonsense"}\n', b"[}\n", encode_line(Stop())])
def test_a_message_that_can_not_be_handled_is_reported_and_ends_the_reading(
    ends: tuple[socket.socket, socket.socket], line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    got: queue.SimpleQueue[str] = queue.SimpleQueue()
    Channel(ends[1], TO_CORE).start_reading(
        fail, on_end=lambda: got.put("end"), on_failure=lambda: got.put("failure")
    )
    ends[0].sendall(line)
    assert got.get(timeout=120) == "failure"
    assert "could not be handled" in caplog.text


def test_without_a_parent_there_is_no_message(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(b'{"type":"St')
    ends[0].close()
    assert Channel(ends[1], TO_CORE).receive() is None
