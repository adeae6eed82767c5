"""Live sessions over real WebSockets, with a scripted transcriber and a detector of loudness."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from websockets.exceptions import ConnectionClosed, InvalidStatus

from sensorium.engine.speech import live as live_module
from sensorium.engine.speech.live import TurnSource
from sensorium.types.errors import EngineLostError
from tests.support.talking import (
    LOUD,
    QUIET,
    LoudnessDetector,
    Talker,
    make_sound,
    to_pcm16,
)
from tests.support.waiting import wait_until
from tests.unit.server.standing_in import RunningServer, serve
from tests.unit.server.transcribing import TEXT, TEXTS, ScriptedTranscriber

OPENAI = "?intent=transcription"
SPOKEN = make_sound((QUIET, 0.5), (LOUD, 1.0), (QUIET, 1.0))
PCM16K = {"type": "audio/pcm", "rate": 16_000}
COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"
FAILED = "conversation.item.input_audio_transcription.failed"


@pytest.fixture
def transcriber() -> ScriptedTranscriber:
    return ScriptedTranscriber()


@pytest.fixture
def make_server(transcriber: ScriptedTranscriber) -> Iterator[Callable[..., RunningServer]]:
    contexts = []

    def make(**options: Any) -> RunningServer:
        source = TurnSource(transcriber, make_detector=LoudnessDetector)
        context = serve(transcriber=transcriber, live=source, **options)
        contexts.append(context)
        return context.__enter__()

    yield make
    for context in contexts:
        context.__exit__(None, None, None)


@pytest.fixture
def server(make_server: Callable[..., RunningServer]) -> RunningServer:
    return make_server()


def begin(server: RunningServer, **fields: Any) -> Talker:
    """Open a session in OpenAI's dialect that takes audio at 16 kHz."""
    talker = Talker(server.url, OPENAI)
    assert talker.receive()["type"] == "session.created"
    assert talker.set_input(format=PCM16K, **fields)["type"] == "session.updated"
    return talker


def get_types(messages: list[dict[str, Any]]) -> list[str]:
    return [message["type"] for message in messages]


def wait_until_empty(server: RunningServer, transcriber: ScriptedTranscriber) -> None:
    def is_empty() -> bool:
        counts = (server.metrics.load, server.metrics.num_websockets, transcriber.num_open)
        return counts == (0, 0, 0)

    wait_until(is_empty, "nothing of a session is left")
    real = server.metrics.real
    assert real.gauge("sensorium:realtime_sessions_active")._value.get() == 0
    assert real.gauge("sensorium:realtime_waiting_seconds")._value.get() == pytest.approx(0)


def get_ends(server: RunningServer, end: str) -> float:
    series = server.metrics.real.counter("sensorium:realtime_sessions_total", end)
    return float(series._value.get())


# ---- OpenAI's dialect


def test_speech_is_found_and_written_down(server: RunningServer) -> None:
    with begin(server) as talker:
        talker.say(SPOKEN)
        messages = talker.receive_until(COMPLETED)
    assert get_types(messages) == [
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        *[DELTA] * len(TEXTS),
        COMPLETED,
    ]
    started, stopped, committed, added, *_, completed = messages
    assert 150 <= started["audio_start_ms"] <= 250  # 300 ms before the voice, in whole frames
    assert 1950 <= stopped["audio_end_ms"] <= 2100  # 500 ms after it
    items = {message.get("item_id", added["item"]["id"]) for message in messages}
    assert items == {committed["item_id"]}
    assert committed["previous_item_id"] is None
    assert added["item"]["content"] == [{"type": "input_audio", "transcript": None}]
    deltas = [message["delta"] for message in messages if message["type"] == DELTA]
    assert "".join(deltas) == completed["transcript"] == TEXT
    usage = completed["usage"]
    assert usage["input_token_details"] == {"text_tokens": 4, "audio_tokens": 1500}
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (1504, 9, 1513)
    assert usage["seconds"] == pytest.approx(stopped["audio_end_ms"] / 1000, abs=0.01)
    ids = [message["event_id"] for message in messages]
    assert len(set(ids)) == len(ids)


def test_a_client_that_commits_gets_all_of_its_audio(
    server: RunningServer, transcriber: ScriptedTranscriber
) -> None:
    with begin(server, turn_detection=None) as talker:
        for seconds in (0.5, 0.25):
            talker.say(make_sound((QUIET, seconds)))
            talker.commit()
            talker.receive_until(COMPLETED)
        talker.commit(event_id="mine")
        (error,) = talker.receive_until("error")
    assert error["error"]["code"] == "input_audio_buffer_commit_empty"
    assert error["error"]["event_id"] == "mine"
    assert [len(media) for media, *_ in transcriber.calls] == [44 + 2 * 8000, 44 + 2 * 4000]


def test_answers_do_not_overtake_events(
    make_server: Callable[..., RunningServer], transcriber: ScriptedTranscriber
) -> None:
    server = make_server()
    for _ in range(20):
        with begin(server, turn_detection=None) as talker:
            talker.say(make_sound((LOUD, 0.5)))
            talker.commit()
            talker.commit()
            kinds = get_types(talker.receive_until("error"))
        assert kinds[:2] == ["input_audio_buffer.committed", "conversation.item.added"]
    wait_until_empty(server, transcriber)


def test_cleared_audio_is_not_transcribed(
    server: RunningServer, transcriber: ScriptedTranscriber
) -> None:
    with begin(server, turn_detection=None) as talker:
        talker.say(make_sound((LOUD, 1.0)))
        talker.send("input_audio_buffer.clear")
        assert talker.receive()["type"] == "input_audio_buffer.cleared"
        talker.say(make_sound((LOUD, 0.5)))
        talker.commit()
        talker.receive_until(COMPLETED)
    assert len(transcriber.calls[0][0]) == 44 + 2 * 8000


def test_a_session_is_described_and_changed(server: RunningServer) -> None:
    with Talker(server.url, "?model=org/tiny") as talker:
        session = talker.receive()["session"]
        assert session["type"] == "transcription"
        assert session["audio"]["input"] == {
            "format": {"type": "audio/pcm", "rate": 24_000},
            "noise_reduction": None,
            "transcription": {"model": "org/tiny", "language": None, "prompt": None},
            "turn_detection": {
                "type": "server_vad",
                "threshold": 0.5,
                "prefix_padding_ms": 300,
                "silence_duration_ms": 500,
            },
        }
        assert session["include"] is None
        changed = talker.set_input(
            format={"type": "audio/pcmu"},
            transcription={"model": "tiny", "language": "de", "prompt": "Ada"},
            turn_detection={"type": "server_vad", "silence_duration_ms": 200},
        )["session"]["audio"]["input"]
        assert changed["format"] == {"type": "audio/pcmu"}
        assert changed["transcription"]["language"] == "de"
        assert changed["turn_detection"]["silence_duration_ms"] == 200
        # Fields that are not sent stay as they are.
        changed = talker.set_input(transcription={"language": "fr"})["session"]["audio"]["input"]
        assert changed["transcription"] == {"model": "org/tiny", "language": "fr", "prompt": "Ada"}
        assert changed["turn_detection"]["silence_duration_ms"] == 200


def test_options_reach_the_transcriber(
    server: RunningServer, transcriber: ScriptedTranscriber
) -> None:
    with Talker(server.url, OPENAI) as talker:
        talker.receive()
        talker.update(
            audio={
                "input": {
                    "format": PCM16K,
                    "transcription": {"language": "de", "prompt": "Ada"},
                    "turn_detection": None,
                }
            },
            include=["item.input_audio_transcription.logprobs"],
        )
        talker.say(make_sound((LOUD, 0.5)))
        talker.commit()
        messages = talker.receive_until(COMPLETED)
    _, options, _ = transcriber.calls[0]
    assert (options.language, options.prompt, options.needs_logprobs) == ("de", "Ada", True)
    logprobs = [message["logprobs"] for message in messages if message["type"] == DELTA]
    assert [entry["token"] for (entry,) in logprobs] == list(TEXTS)
    assert [entry["token"] for entry in messages[-1]["logprobs"]] == list(TEXTS)


WRONG = [
    ({"format": {"type": "audio/pcm", "rate": 8000}}, "format.rate", "16000 or 24000"),
    ({"format": {"type": "audio/pcmu", "rate": 16000}}, "format.rate", "8000"),
    ({"format": {"type": "audio/opus"}}, "format.type", "audio/pcm"),
    ({"turn_detection": {"type": "semantic_vad"}}, "turn_detection.type", "semantic_vad"),
    ({"turn_detection": {"type": "server_vad", "threshold": 2}}, "turn_detection.threshold", "1"),
    (
        {"turn_detection": {"type": "server_vad", "idle_timeout_ms": 5000}},
        "turn_detection.idle_timeout_ms",
        "not supported",
    ),
    ({"noise_reduction": {"type": "near_field"}}, "noise_reduction", "not supported"),
    ({"transcription": {"model": "whisper-1"}}, "transcription.model", "not served"),
    ({"transcription": {"delay": "low"}}, "transcription.delay", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "words"), WRONG, ids=[row[1] for row in WRONG])
def test_what_a_session_can_not_do_is_named_and_changes_nothing(
    server: RunningServer, fields: dict[str, Any], param: str, words: str
) -> None:
    with Talker(server.url, OPENAI) as talker:
        before = talker.receive()["session"]
        error = talker.set_input(**fields)["error"]
        assert error["param"] == f"session.audio.input.{param}"
        assert words in error["message"]
        assert error["type"] in ("invalid_request_error", "not_found_error")
        after = talker.set_input(turn_detection={"type": "server_vad"})["session"]
        assert after == before


def test_other_sessions_than_transcriptions_are_refused(server: RunningServer) -> None:
    with Talker(server.url, OPENAI) as talker:
        talker.receive()
        talker.send("session.update", session={"type": "realtime"}, event_id="e1")
        error = talker.receive()["error"]
        assert (error["param"], error["event_id"]) == ("session.type", "e1")
        talker.send("transcription_session.update", session={})
        assert "session.update" in talker.receive()["error"]["message"]
        talker.send("response.create")
        assert talker.receive()["error"]["code"] == "unknown_event"


def make_mulaw(samples: Any) -> bytes:
    import av

    codec = av.CodecContext.create("pcm_mulaw", "w")
    codec.sample_rate, codec.layout, codec.format = 8000, "mono", "s16"
    frame = av.AudioFrame.from_ndarray(
        (samples[None] * 32767).astype(np.int16), format="s16", layout="mono"
    )
    frame.sample_rate = 8000
    return b"".join(bytes(packet) for packet in [*codec.encode(frame), *codec.encode(None)])


@pytest.mark.parametrize("rate", [8000, 16_000, 24_000])
def test_audio_of_any_format_has_its_length(
    server: RunningServer, transcriber: ScriptedTranscriber, rate: int
) -> None:
    sound = make_sound((LOUD, 1.0), rate=rate)
    form = {"type": "audio/pcmu"} if rate == 8000 else {"type": "audio/pcm", "rate": rate}
    audio = make_mulaw(sound) if rate == 8000 else to_pcm16(sound)
    with begin(server, turn_detection=None) as talker:
        talker.set_input(format=form)
        for start in range(0, len(audio), 333):  # chunks end within samples
            talker.append(audio[start : start + 333])
        talker.commit()
        talker.receive_until(COMPLETED)
    heard = np.frombuffer(transcriber.calls[0][0][44:], "<i2") / 32768
    assert len(heard) == 16_000
    expected = make_sound((LOUD, 1.0))
    assert np.abs(heard - expected)[500:-500].max() < 0.02


# ---- the openai package


async def talk_by_sdk(server: RunningServer) -> list[Any]:
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    events = []
    async with (
        client,
        client.realtime.connect(extra_query={"intent": "transcription"}) as connection,
    ):
        await connection.session.update(
            session={
                "type": "transcription",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": 24_000},
                        "transcription": {"model": "tiny", "language": "en"},
                        "turn_detection": {"type": "server_vad", "threshold": 0.5},
                    }
                },
            }
        )
        sound = make_sound((QUIET, 0.5), (LOUD, 1.0), (QUIET, 1.0), rate=24_000)
        for start in range(0, len(sound), 2400):
            audio = base64.b64encode(to_pcm16(sound[start : start + 2400])).decode()
            await connection.input_audio_buffer.append(audio=audio)
        async for event in connection:
            events.append(event)
            if event.type == COMPLETED:
                break
    return events


def test_the_openai_package_understands_every_event(server: RunningServer) -> None:
    events = asyncio.run(asyncio.wait_for(talk_by_sdk(server), 120))
    kinds = {event.type: type(event).__name__ for event in events}
    assert kinds == {
        "session.created": "SessionCreatedEvent",
        "session.updated": "SessionUpdatedEvent",
        "input_audio_buffer.speech_started": "InputAudioBufferSpeechStartedEvent",
        "input_audio_buffer.speech_stopped": "InputAudioBufferSpeechStoppedEvent",
        "input_audio_buffer.committed": "InputAudioBufferCommittedEvent",
        "conversation.item.added": "ConversationItemAdded",
        "conversation.item.done": "ConversationItemDone",
        DELTA: "ConversationItemInputAudioTranscriptionDeltaEvent",
        COMPLETED: "ConversationItemInputAudioTranscriptionCompletedEvent",
    }
    for event in events:  # strictly: a field that is missing or has another type is refused
        type(event).model_validate(event.model_dump())
    assert events[-1].transcript == TEXT
    assert events[-1].usage.type == "tokens"
    assert events[1].session.audio.input.turn_detection.type == "server_vad"


def test_the_synchronous_client_commits(server: RunningServer) -> None:
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.realtime.connect(model="tiny") as connection,
    ):
        connection.session.update(
            session={"type": "transcription", "audio": {"input": {"turn_detection": None}}}
        )
        sound = to_pcm16(make_sound((LOUD, 0.5), rate=24_000))
        connection.input_audio_buffer.append(audio=base64.b64encode(sound).decode())
        connection.input_audio_buffer.commit()
        text = next(event.transcript for event in connection if event.type == COMPLETED)
        connection.input_audio_buffer.commit()
        error = next(event.error for event in connection if event.type == "error")
    assert text == TEXT
    assert isinstance(error, openai.types.realtime.RealtimeError)
    assert error.code == "input_audio_buffer_commit_empty"


# ---- vLLM's dialect


def test_the_other_dialect_has_one_text_for_the_whole_sound(server: RunningServer) -> None:
    with Talker(server.url) as talker:
        created = talker.receive()
        assert created["type"] == "session.created"
        assert abs(created["created"] - time.time()) < 100
        talker.send("session.update", model="tiny")
        talker.commit()  # as vLLM's clients do, to start
        for _ in range(2):
            talker.say(SPOKEN)
        talker.commit(final=True)
        messages = talker.receive_until("transcription.done")
        assert set(get_types(messages)) == {"transcription.delta", "transcription.done"}
        done = messages.pop()
        assert done["text"] == f"{TEXT} {TEXT}" == "".join(each["delta"] for each in messages)
        assert done["usage"] == {
            "prompt_tokens": 2 * 1504,
            "completion_tokens": 18,
            "total_tokens": 2 * 1513,
            "prompt_tokens_details": {"audio_tokens": 3000},
            "seconds": 5.0,
        }
        # Another sound may follow.
        talker.say(make_sound((QUIET, 0.2), (LOUD, 0.5)))
        talker.commit(final=True)
        assert talker.receive_until("transcription.done")[-1]["text"] == TEXT
        talker.commit(final=True)
        done = talker.receive()
        assert (done["text"], done["usage"]["seconds"]) == ("", 0.0)


def test_errors_of_the_other_dialect_are_text_and_a_code(server: RunningServer) -> None:
    with Talker(server.url) as talker:
        talker.receive()
        talker.send("session.update", model="whisper-1")
        error = talker.receive()
        assert error["type"] == "error"
        assert error["code"] == "model_not_found"
        assert "whisper-1" in error["error"]
        talker.send("input_audio_buffer.append", audio="not base64!")
        assert talker.receive() == {
            "type": "error",
            "error": "audio: must be valid base64",
            "code": "invalid_request",
        }


@pytest.mark.parametrize(
    ("query", "is_openai"),
    [
        ("", False),
        ("?intent=transcription", True),
        ("?model=tiny", True),
        ("?dialect=openai", True),
        ("?model=tiny&dialect=vllm", False),
    ],
)
def test_the_address_decides_the_dialect(
    server: RunningServer, query: str, is_openai: bool
) -> None:
    with Talker(server.url, query) as talker:
        assert ("session" in talker.receive()) == is_openai


# ---- who may connect


def get_refusal(server: RunningServer, query: str = OPENAI, **options: Any) -> httpx.Response:
    with pytest.raises(InvalidStatus) as caught:
        Talker(server.url, query, **options)
    answer = caught.value.response
    headers = list(answer.headers.raw_items())
    return httpx.Response(answer.status_code, headers=headers, content=bytes(answer.body))


def test_a_session_needs_a_key_if_the_server_does(
    make_server: Callable[..., RunningServer],
) -> None:
    server = make_server(api_key=("secret", "other"))
    refusal = get_refusal(server)
    assert refusal.status_code == 401
    assert refusal.json()["error"]["code"] == "invalid_api_key"
    wrong = {"Authorization": "Bearer wrong"}
    assert get_refusal(server, additional_headers=wrong).status_code == 401
    offered = ["realtime", "openai-insecure-api-key.wrong"]
    assert get_refusal(server, subprotocols=offered).status_code == 401
    right = {"Authorization": "Bearer secret"}
    with Talker(server.url, OPENAI, additional_headers=right) as talker:
        assert talker.receive()["type"] == "session.created"
        assert talker.socket.subprotocol is None
    offered = ["realtime", "openai-insecure-api-key.other"]
    with Talker(server.url, OPENAI, subprotocols=offered) as talker:
        assert talker.receive()["type"] == "session.created"
        assert talker.socket.subprotocol == "realtime"
    assert server.metrics.refusals["unauthorized"] == 3


def test_foreign_pages_and_hosts_are_refused(make_server: Callable[..., RunningServer]) -> None:
    server = make_server(allowed_origins=("https://friend.example",))
    refusal = get_refusal(server, origin="https://evil.example")
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (403, "origin_not_allowed")
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(
            b"GET /v1/realtime HTTP/1.1\r\nHost: evil.example\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert b" 403 " in raw.recv(100)
    for origin in (server.url, "https://friend.example"):
        with Talker(server.url, OPENAI, origin=origin) as talker:
            assert talker.receive()["type"] == "session.created"


def test_sessions_are_limited_and_count_as_requests(
    make_server: Callable[..., RunningServer], transcriber: ScriptedTranscriber
) -> None:
    server = make_server(max_realtime_sessions=2)
    with begin(server), begin(server):
        assert server.metrics.load == 2
        refusal = get_refusal(server)
        assert refusal.status_code == 429
        assert "realtime sessions (limit 2)" in refusal.json()["error"]["message"]
        assert refusal.headers["retry-after"] == "1"
    wait_until_empty(server, transcriber)
    with begin(server):
        pass
    busy = make_server(max_concurrent_requests=1)
    with begin(busy):
        refusal = get_refusal(busy)
        assert "concurrent requests (limit 1)" in refusal.json()["error"]["message"]
        assert busy.chat().status_code == 429


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("?model=gpt-realtime", 404, "model"),
        ("?intent=conversation", 400, "intent"),
        ("?dialect=klingon", 400, "dialect"),
    ],
)
def test_a_wrong_address_is_refused_with_a_reason(
    server: RunningServer, query: str, status: int, param: str
) -> None:
    refusal = get_refusal(server, query)
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (status, param)
    assert refusal.headers["x-request-id"]


def test_a_model_that_does_not_transcribe_has_no_sessions() -> None:
    with serve() as running:
        refusal = get_refusal(running)
        assert refusal.status_code == 400
        assert "does not transcribe" in refusal.json()["error"]["message"]


def test_the_route_says_that_it_is_a_websocket(server: RunningServer) -> None:
    answer = server.get("/v1/realtime")
    assert (answer.status_code, answer.json()["error"]["code"]) == (426, "upgrade_required")


# ---- faults


def test_garbage_is_answered_and_the_session_goes_on(server: RunningServer) -> None:
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
            (b"\x00\x01" * 100, "invalid_json"),
            ("[" * 100_000, "invalid_json"),
        ):
            talker.socket.send(message)
            error = talker.receive()
            assert error["type"] == "error", message[:50]
            assert error["error"]["code"] == code
            assert error["error"]["type"] == "invalid_request_error"
        talker.say(make_sound((LOUD, 0.5)))
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
        neighbour.say(make_sound((LOUD, 0.5)))
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
        chunk = to_pcm16(make_sound((QUIET, 60.0)))
        for _ in range(5):
            talker.append(chunk)
        talker.append(to_pcm16(make_sound((QUIET, 1.0))))
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
    turn = to_pcm16(make_sound((LOUD, 9.0), (QUIET, 1.0)))
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
        sender.join(60)
        assert len(sent) == num_turns  # nothing was dropped
    assert len(transcriber.calls) == num_turns


def test_a_lost_engine_fails_the_item_and_not_the_session(
    server: RunningServer, transcriber: ScriptedTranscriber
) -> None:
    def lose(_: int) -> None:
        raise EngineLostError("The engine ended.")

    with begin(server, turn_detection=None) as talker:
        transcriber.between = lose
        talker.say(make_sound((LOUD, 0.5)))
        talker.commit()
        failed = talker.receive_until(FAILED)[-1]
        assert failed["error"]["code"] == "engine_lost"
        assert failed["error"]["message"] == "The engine ended."
        assert failed["item_id"]
        transcriber.between = None
        talker.say(make_sound((LOUD, 0.5)))
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
    server = make_server(realtime_max_session=2.0)
    with begin(server) as talker:
        talker.say(make_sound((LOUD, 1.0)))  # the voice is not silent yet
        messages = talker.receive_until("error")
        assert next(each for each in messages if each["type"] == COMPLETED)["transcript"] == TEXT
        assert messages[-1]["error"]["code"] == "session_expired"
        with pytest.raises(ConnectionClosed) as caught:
            talker.receive()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 4001


def test_a_server_that_stops_lets_the_last_words_be_written(
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
    garbage = make_frame(json.dumps({"type": "x" * 100_000}))
    raw.settimeout(0.2)
    deadline = time.monotonic() + 60
    while get_ends(server, "unread") == 0 and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            raw.sendall(garbage)
    wait_until(lambda: get_ends(server, "unread") == 1, "it is cut off")
    raw.close()
    wait_until_empty(server, transcriber)


def open_raw(server: RunningServer) -> socket.socket:
    """Open a WebSocket that never reads, with a small buffer."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", server.port))
    raw.sendall(
        b"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\n"
        b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    return raw


def make_frame(text: str) -> bytes:
    """Return a masked text frame, as a client sends it. The mask is zero."""
    body = text.encode()
    return b"\x81\xff" + len(body).to_bytes(8, "big") + bytes(4) + body


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
    server = make_server(ping_s=0.2)
    turn = to_pcm16(make_sound((LOUD, 9.0), (QUIET, 1.0)))
    with begin(server) as talker:
        sender = threading.Thread(target=lambda: [talker.append(turn) for _ in range(20)])
        sender.start()
        waiting = server.metrics.real.gauge("sensorium:realtime_waiting_seconds")
        wait_until(lambda: waiting._value.get() > live_module.MAX_WAITING_S, "it is not read")
        time.sleep(2.0)  # several pings, whose answers stay behind the audio
        server.loop.call_soon_threadsafe(gate.set)
        for _ in range(20):
            talker.receive_until(COMPLETED)
        sender.join(60)


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
