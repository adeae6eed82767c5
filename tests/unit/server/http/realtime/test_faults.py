"""Live sessions over real WebSockets that end, or have faulty clients or engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from websockets.exceptions import ConnectionClosed

from sensorium.engine.speech import live as live_module
from sensorium.types.errors import EngineLostError
from tests.support.talking import (
    LOUD,
    QUIET,
    Talker,
    make_tones,
    to_pcm16,
)
from tests.support.waiting import wait_until
from tests.unit.server.http.realtime.clients import (
    COMPLETED,
    FAILED,
    OPENAI,
    PCM16K,
    SPOKEN,
    begin,
    get_ends,
    make_frame,
    open_raw,
    wait_until_empty,
)
from tests.unit.server.standing_in import RunningServer
from tests.unit.server.transcribing import TEXT, ScriptedTranscriber


def test_garbage_is_answered_and_the_session_continues(server: RunningServer) -> None:
    with begin(server, turn_detection=None) as talker:
        for message, code in (
            ("hello", "invalid_json"),
            ("[1, 2]", "invalid_json"),
            ("{}", None),
            ('{"type": 5}', None),
            ('{"type": "input_audio_buffer.append"}', None),
            ('{"type": "input_audio_buffer.append", "audio": "%%%"}', None),
            ('{"type": "session.update"}', None),
            ('{"type": "session.update", "session": {"type": "transcription", "audio": 3}}', None),
            (b"\x00\x01" * 100, "unsupported_binary"),
            ("[" * 100_000, "invalid_json"),
        ):
            talker.socket.send(message)
            error = talker.receive()
            assert error["type"] == "error", message[:50]
            assert error["error"]["code"] == code
            assert error["error"]["type"] == "invalid_request_error"
        talker.say(make_tones((LOUD, 0.5)))
        talker.commit()
        assert talker.receive_until(COMPLETED)[-1]["transcript"] == TEXT


def test_a_message_that_is_too_large_closes_the_connection(
    server: RunningServer, transcriber: ScriptedTranscriber
) -> None:
    with begin(server) as talker, begin(server, turn_detection=None) as neighbour:
        with suppress(ConnectionClosed):
            talker.append(bytes(75_000_000))  # 100 MB in base64
        with pytest.raises(ConnectionClosed) as caught:
            talker.receive()
        assert caught.value.rcvd is None or caught.value.rcvd.code == 1009
        neighbour.say(make_tones((LOUD, 0.5)))
        neighbour.commit()
        assert neighbour.receive_until(COMPLETED)[-1]["transcript"] == TEXT
    wait_until_empty(server, transcriber)


def test_a_frame_that_only_claims_to_be_large_is_closed_with_its_code(
    server: RunningServer,
) -> None:
    with begin(server) as talker:
        # The header of a masked text frame with 100 MB.
        talker.socket.socket.sendall(b"\x81\xff" + (100_000_000).to_bytes(8, "big") + bytes(4))
        with pytest.raises(ConnectionClosed) as caught:
            talker.receive()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1009


def test_a_client_that_vanishes_leaves_nothing(
    server: RunningServer, transcriber: ScriptedTranscriber
) -> None:
    transcriber.between = lambda _: asyncio.sleep(3600)
    talker = begin(server)
    talker.say(SPOKEN)
    wait_until(lambda: transcriber.num_open == 1, "it is being transcribed")
    talker.socket.socket.shutdown(socket.SHUT_RDWR)
    wait_until_empty(server, transcriber)
    assert transcriber.num_aborted == 1
    assert get_ends(server, "client") == 1


def test_sessions_that_come_and_go_leave_nothing(
    make_server: Callable[..., RunningServer], transcriber: ScriptedTranscriber
) -> None:
    server = make_server(max_realtime_sessions=10)
    num_threads = threading.active_count()
    for round_ in range(10):
        talkers = [begin(server) for _ in range(10)]
        for index, talker in enumerate(talkers):
            talker.say(SPOKEN[: 4000 * (index + 1)], step=4000)
        for talker in talkers:
            if round_ % 2:
                talker.socket.close()
            else:
                talker.socket.socket.shutdown(socket.SHUT_RDWR)
        wait_until_empty(server, transcriber)
    assert get_ends(server, "client") == 100
    assert threading.active_count() <= num_threads + 20  # those of a pool that is reused
    tasks = asyncio.run_coroutine_threadsafe(list_tasks(), server.loop).result(60)
    assert [name for name in tasks if "Turn" in name or "Realtime" in name] == []


async def list_tasks() -> list[str]:
    return [repr(task.get_coro()) for task in asyncio.all_tasks()]


def test_a_buffer_that_is_never_committed_is_bounded(server: RunningServer) -> None:
    with begin(server, turn_detection=None) as talker:
        chunk = to_pcm16(make_tones((QUIET, 60.0)))
        for _ in range(5):
            talker.append(chunk)
        talker.append(to_pcm16(make_tones((QUIET, 1.0))))
        error = talker.receive()["error"]
        assert error["code"] == "input_audio_buffer_full"
        assert "300 seconds" in error["message"]
        talker.send("input_audio_buffer.clear")
        assert talker.receive()["type"] == "input_audio_buffer.cleared"
        talker.append(chunk)
        talker.commit()
        talker.receive_until(COMPLETED)


def test_a_client_that_sends_too_fast_is_slowed(
    server: RunningServer, transcriber: ScriptedTranscriber
) -> None:
    """Ten minutes of speech in one go: the connection takes only so much before work is done."""
    gate = asyncio.Event()
    transcriber.between = lambda _: gate.wait()
    turn = to_pcm16(make_tones((LOUD, 9.0), (QUIET, 1.0)))
    num_turns, sent = 60, []

    def send(talker: Talker) -> None:
        for _ in range(num_turns):
            talker.append(turn)
            sent.append(time.monotonic())

    with begin(server) as talker:
        sender = threading.Thread(target=send, args=(talker,))
        sender.start()
        wait_until(lambda: len(sent) >= 7, "as much as fits was sent")
        time.sleep(1.0)
        num_held = len(sent)
        waiting = server.metrics.real.gauge("sensorium:realtime_waiting_seconds")._value.get()
        assert num_held < num_turns  # it is blocked
        assert waiting <= live_module.MAX_WAITING_S + 30
        server.loop.call_soon_threadsafe(gate.set)
        for _ in range(num_turns):
            talker.receive_until(COMPLETED)
        sender.join(240)
        assert len(sent) == num_turns  # nothing was dropped
    assert len(transcriber.calls) == num_turns


def test_a_lost_engine_fails_the_item_and_not_the_session(
    server: RunningServer, transcriber: ScriptedTranscriber
) -> None:
    def lose(_: int) -> None:
        raise EngineLostError("The engine ended.")

    with begin(server, turn_detection=None) as talker:
        transcriber.between = lose
        talker.say(make_tones((LOUD, 0.5)))
        talker.commit()
        failed = talker.receive_until(FAILED)[-1]
        assert failed["error"]["code"] == "engine_lost"
        assert failed["error"]["message"] == "The engine ended."
        assert failed["item_id"]
        transcriber.between = None
        talker.say(make_tones((LOUD, 0.5)))
        talker.commit()
        assert talker.receive_until(COMPLETED)[-1]["transcript"] == TEXT
    ends = server.metrics.real.counter("vllm:request_success_total", "error")
    assert ends._value.get() == 1


def test_an_idle_session_is_closed_with_its_code(
    make_server: Callable[..., RunningServer], transcriber: ScriptedTranscriber
) -> None:
    server = make_server(realtime_idle_timeout=0.5)
    with begin(server) as talker:
        assert talker.receive()["error"]["code"] == "session_idle"
        with pytest.raises(ConnectionClosed) as caught:
            talker.receive()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 4000
        assert "--realtime-idle-timeout" in caught.value.rcvd.reason
    wait_until_empty(server, transcriber)
    assert get_ends(server, "idle") == 1


def test_a_session_that_reaches_its_end_gets_what_was_said(
    make_server: Callable[..., RunningServer],
) -> None:
    server = make_server(realtime_max_session=5.0)
    with begin(server) as talker:
        talker.say(make_tones((LOUD, 1.0)))  # the voice is not silent yet
        messages = talker.receive_until("error")
        assert next(each for each in messages if each["type"] == COMPLETED)["transcript"] == TEXT
        assert messages[-1]["error"]["code"] == "session_expired"
        with pytest.raises(ConnectionClosed) as caught:
            talker.receive()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 4001


def test_a_server_that_stops_still_transcribes_the_last_words(
    make_server: Callable[..., RunningServer], transcriber: ScriptedTranscriber
) -> None:
    gate = asyncio.Event()
    transcriber.between = lambda _: gate.wait()
    server = make_server()
    with begin(server) as talker:
        talker.say(SPOKEN)
        wait_until(lambda: transcriber.num_open == 1, "it is being transcribed")
        server.stop()
        time.sleep(0.5)
        assert transcriber.num_open == 1  # the server waits
        server.loop.call_soon_threadsafe(gate.set)
        messages = talker.receive_until("error")
        assert next(each for each in messages if each["type"] == COMPLETED)["transcript"] == TEXT
        assert messages[-1]["error"]["code"] == "session_draining"
        with pytest.raises(ConnectionClosed) as caught:
            talker.receive()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1012


def test_a_client_that_reads_nothing_is_cut_off(
    make_server: Callable[..., RunningServer], transcriber: ScriptedTranscriber
) -> None:
    server = make_server(stream_timeout=0.5)
    raw = open_raw(server)
    hints = {"audio": {"input": {"transcription": {"prompt": "x" * 16_000}}}}  # they come back
    update = make_frame(json.dumps({"type": "session.update", "session": hints}))
    raw.settimeout(0.2)
    deadline = time.monotonic() + 240
    while get_ends(server, "unread") == 0 and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            raw.sendall(update)
    wait_until(lambda: get_ends(server, "unread") == 1, "it is cut off")
    raw.close()
    wait_until_empty(server, transcriber)


def test_a_client_that_answers_no_ping_is_closed(
    make_server: Callable[..., RunningServer], transcriber: ScriptedTranscriber
) -> None:
    server = make_server(ping_s=0.3)
    with open_raw(server) as raw:
        raw.settimeout(60)
        received = b""
        while piece := raw.recv(4096):
            received += piece
    assert received.endswith(b"\x03\xf3keepalive ping timeout")  # the close code 1011
    wait_until_empty(server, transcriber)


def test_a_client_that_is_not_read_needs_to_answer_no_ping(
    make_server: Callable[..., RunningServer], transcriber: ScriptedTranscriber
) -> None:
    gate = asyncio.Event()
    transcriber.between = lambda _: gate.wait()
    # Once it is read again, it has to answer in time, however busy the machine is.
    server = make_server(ping_s=0.2, ping_timeout_s=5.0)
    turn = to_pcm16(make_tones((LOUD, 9.0), (QUIET, 1.0)))
    with begin(server) as talker:
        sender = threading.Thread(target=lambda: [talker.append(turn) for _ in range(20)])
        sender.start()
        waiting = server.metrics.real.gauge("sensorium:realtime_waiting_seconds")
        wait_until(lambda: waiting._value.get() > live_module.MAX_WAITING_S, "it is not read")
        time.sleep(6.0)  # the answers to all pings stay behind the audio
        server.loop.call_soon_threadsafe(gate.set)
        for _ in range(20):
            talker.receive_until(COMPLETED)
        sender.join(240)


def test_a_session_has_a_log_line_at_its_start_and_its_end(
    make_server: Callable[..., RunningServer],
    transcriber: ScriptedTranscriber,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = make_server(realtime_idle_timeout=1.0)

    def fail(_: int) -> None:
        raise EngineLostError("The engine ended.")

    with caplog.at_level(logging.INFO, logger="sensorium.server.http.realtime.route"):
        with Talker(server.url, OPENAI) as talker:
            session = talker.receive()["session"]
            talker.set_input(format=PCM16K)
            talker.say(SPOKEN)
            talker.receive_until(COMPLETED)
            transcriber.between = fail
            talker.say(SPOKEN)
            talker.receive_until(FAILED)
            talker.receive_until("error")
        wait_until_empty(server, transcriber)
        with Talker(server.url):
            pass
        wait_until_empty(server, transcriber)
    lines = [record.getMessage() for record in caplog.records]
    begin, end, *other = lines
    assert begin.startswith(f"live session {session['id']} opens: request ")
    assert begin.endswith(", model tiny, openai dialect")
    start = f"live session {session['id']} ended: idle (4000), after "
    assert end.startswith(start)
    assert end.endswith(" s with 5.0 s of audio, 2 items, 1 of them failed")
    assert other[0].endswith("vllm dialect")
    assert "ended: client, after " in other[1]
    assert len(lines) == 4


def test_items_are_measured(server: RunningServer, transcriber: ScriptedTranscriber) -> None:
    with begin(server) as talker:
        talker.say(SPOKEN)
        talker.receive_until(COMPLETED)
    wait_until_empty(server, transcriber)
    real = server.metrics.real
    audio = real.counter("sensorium:realtime_audio_seconds_total")._value.get()
    assert audio == pytest.approx(2.5)
    for name in ("lag", "item", "session"):
        series = real.histogram(f"sensorium:realtime_{name}_seconds")
        assert series._sum.get() > 0
    assert real.counter("vllm:request_success_total", "stop")._value.get() == 1
    assert real.counter("vllm:generation_tokens_total")._value.get() == 9
