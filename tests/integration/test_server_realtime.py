"""Live sessions of a real server: the embedded model gets its samples, and processes are killed.

What needs no engine is in `tests/unit/server/http/realtime`.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from websockets.exceptions import ConnectionClosed

from sensorium.embedded import EMBEDDED_MODEL
from tests.integration.speaking import WORDS, make_brief, read_sample, speak
from tests.support.server import ServerProcess, serve
from tests.support.talking import RATE, Talker, to_pcm16
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-realtime")
OPENAI = "?intent=transcription"
PCM16K = {"type": "audio/pcm", "rate": RATE}
COMPLETED = "conversation.item.input_audio_transcription.completed"
FAILED = "conversation.item.input_audio_transcription.failed"
WAIT_S = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve(EMBEDDED_MODEL, "--max-realtime-sessions", "16") as running:
        yield running


def begin(server: ServerProcess, **fields: Any) -> Talker:
    talker = Talker(server.get_url(), OPENAI)
    talker.receive()
    assert talker.set_input(format=PCM16K, **fields)["type"] == "session.updated"
    return talker


def get_active(server: ServerProcess) -> tuple[float, ...]:
    metrics = server.get_metrics()
    names = ("sensorium:realtime_sessions_active", "vllm:websocket_connections_active")
    return (*(metrics[name] for name in names), server.get("/load").json()["server_load"])


def wait_until_idle(server: ServerProcess) -> None:
    def is_idle() -> bool:
        metrics = server.get_metrics()
        running = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
        return get_active(server) == (0, 0, 0) and running == 0

    wait_until(is_idle, "nothing of a session is left")


def test_the_embedded_model_transcribes_live_speech(server: ServerProcess) -> None:
    wait_until_idle(server)  # sessions of other tests are counted when they end
    before = server.get_metrics()
    with begin(server) as talker:
        talker.say(speak("speech", "question"))
        texts = [talker.receive_until(COMPLETED)[-1]["transcript"] for _ in WORDS]
        assert texts == list(WORDS.values())
        assert get_active(server) == (1, 1, 1)
    with Talker(server.get_url()) as talker:
        talker.receive()
        talker.say(speak("speech", "question"))
        talker.commit(final=True)
        assert talker.receive_until("transcription.done")[-1]["text"] == " ".join(WORDS.values())
    wait_until_idle(server)
    after = server.get_metrics()

    def count(name: str) -> float:
        series = f"sensorium:realtime_{name}"
        return after[series] - before.get(series, 0.0)

    assert count('sessions_total{end="client"}') == 2
    assert count("lag_seconds_count") == 4
    assert count("chunk_seconds_count") > 4
    assert after["sensorium:realtime_waiting_seconds"] == pytest.approx(0, abs=1e-6)
    received_s = 2 * len(speak("speech", "question")) / RATE
    assert count("audio_seconds_total") == pytest.approx(received_s)


def test_the_openai_package_commits_without_turn_detection(server: ServerProcess) -> None:
    async def talk() -> str:
        client = AsyncOpenAI(base_url=server.get_url("/v1"), api_key="none", max_retries=0)
        async with client, client.realtime.connect(model=EMBEDDED_MODEL) as connection:
            await connection.session.update(
                session={"type": "transcription", "audio": {"input": {"turn_detection": None}}}
            )
            audio = to_pcm16(read_sample("speech", 24_000))
            for start in range(0, len(audio), 9600):
                chunk = base64.b64encode(audio[start : start + 9600]).decode()
                await connection.input_audio_buffer.append(audio=chunk)
            await connection.input_audio_buffer.commit()
            async for event in connection:
                assert event.type != "error", event
                if event.type == COMPLETED:
                    return event.transcript
        raise AssertionError("the session ended without a transcript")

    assert asyncio.run(asyncio.wait_for(talk(), WAIT_S)) == WORDS["speech"]


def test_sessions_at_the_same_time_do_not_mix(server: ServerProcess) -> None:
    names = ["speech", "question"] * 3
    texts: dict[int, list[str]] = {}

    def talk(index: int) -> None:
        with begin(server) as talker:
            own = (names[index], names[index + 1], names[index])
            talker.say(speak(*own))
            texts[index] = [talker.receive_until(COMPLETED)[-1]["transcript"] for _ in own]

    threads = [threading.Thread(target=talk, args=(index,)) for index in range(5)]
    for thread in threads:
        thread.start()
    answer = server.make_client().chat.completions.create(
        model=EMBEDDED_MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=4
    )
    assert answer.choices[0].message.content is not None
    for thread in threads:
        thread.join(WAIT_S)
    for index, found in texts.items():
        assert found == [WORDS[names[index + step % 2]] for step in range(3)]
    assert len(texts) == 5


def test_many_sessions_that_are_dropped_leave_nothing(server: ServerProcess) -> None:
    wait_until_idle(server)
    (frontend,) = server.find_children("frontend_main")
    num_files = len(os.listdir(f"/proc/{frontend}/fd"))
    audio = speak("speech")
    for _ in range(10):
        talkers = [begin(server) for _ in range(10)]
        for index, talker in enumerate(talkers):
            talker.say(audio[: 5000 * (index + 1)], step=5000)
        for talker in talkers:
            talker.socket.socket.shutdown(socket.SHUT_RDWR)
        wait_until_idle(server)
    assert len(os.listdir(f"/proc/{frontend}/fd")) <= num_files + 2
    with begin(server) as talker:
        talker.say(audio)
        assert talker.receive_until(COMPLETED)[-1]["transcript"] == WORDS["speech"]


def test_a_session_survives_a_killed_core() -> None:
    with serve(EMBEDDED_MODEL) as running, begin(running) as talker:
        audio = speak("speech")
        talker.say(audio)
        assert talker.receive_until(COMPLETED)[-1]["transcript"] == WORDS["speech"]
        (core,) = running.find_children("core_main")
        os.kill(core, signal.SIGSTOP)
        talker.say(speak("question"))
        talker.receive_until("conversation.item.done")
        os.kill(core, signal.SIGKILL)
        failed = talker.receive_until(FAILED)[-1]
        assert failed["error"]["code"] == "engine_lost"
        wait_until(lambda: running.get("/health").status_code == 200, "there is a new core")
        talker.say(audio)
        assert talker.receive_until(COMPLETED)[-1]["transcript"] == WORDS["speech"]


def test_a_server_that_is_stopped_transcribes_the_last_words() -> None:
    waits = ("--shutdown-timeout", "3600")  # for sessions: there is none left to wait for
    with serve(EMBEDDED_MODEL, *waits) as running, begin(running) as talker:
        talker.say(speak("speech")[: -RATE // 2])  # the end of the turn is not found yet
        talker.send("session.update", session={"type": "transcription"})
        talker.receive_until("session.updated")  # so the server has all of the audio
        assert isinstance(running.process.pid, int)
        os.kill(running.process.pid, signal.SIGTERM)
        messages = talker.receive_until("error")
        texts = [each["transcript"] for each in messages if each["type"] == COMPLETED]
        assert texts == [WORDS["speech"]]
        assert messages[-1]["error"]["code"] == "session_draining"
        with pytest.raises(ConnectionClosed) as caught:
            talker.receive()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1012
        assert running.wait() == 0


def test_whisper_transcribes_commits_and_turns(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    directory = make_brief(tiny_model("whisper"), tmp_path / "whisper")
    with serve(str(directory)) as running:
        audio = speak("speech")
        with begin(running, turn_detection=None) as talker:
            talker.say(audio)
            talker.commit()
            messages = talker.receive_until(COMPLETED)
        deltas = [each["delta"] for each in messages if each["type"].endswith(".delta")]
        assert "".join(deltas) == messages[-1]["transcript"]
        with begin(running) as talker:
            talker.say(audio)
            assert talker.receive_until(COMPLETED)[-1]["usage"]["seconds"] > 2
        with Talker(running.get_url(), OPENAI) as talker:
            talker.receive()
            error = talker.set_input(transcription={"language": "klingon"})["error"]
            assert "klingon" in error["message"]
            assert error["param"] == "session.audio.input.transcription.language"
            error = talker.set_input(transcription={"prompt": "<|endoftext|>"})["error"]
            assert error["param"] == "session.audio.input.transcription.prompt"
