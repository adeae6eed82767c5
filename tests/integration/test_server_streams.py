"""Live sessions of a streaming model, over a real server.

`tests/parity/test_streaming_audio.py` compares its tokens with Transformers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sensorium.utils.silences import Samples
from tests.support.media import write_audio
from tests.support.server import COMMAND, ROOT, ServerProcess, serve
from tests.support.talking import Talker, to_pcm16
from tests.support.tones import RATE, TOKEN, StreamedReference, make_tones
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-streams")
OPENAI = "?intent=transcription"
PCM16K = {"type": "audio/pcm", "rate": RATE}
TRANSCRIPTION = "conversation.item.input_audio_transcription"
DELAYS: tuple[Any, ...] = ("minimal", "low", "medium", "high", "xhigh", 80, 400, None)
DELAYS_MS = (160, 240, 480, 960, 2400, 80, 400, 480)
LENGTHS_S = (4.0, 2.5, 6.03, 1.7, 3.0, 5.5, 2.0, 9.0)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], str]) -> str:
    return tiny_model("voxtral_realtime")


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[ServerProcess]:
    with serve(model, "--max-model-len", "1024", "--max-num-seqs", "16") as running:
        yield running


@pytest.fixture(scope="module")
def audios() -> list[Samples]:
    return [make_tones(seed, seconds) for seed, seconds in enumerate(LENGTHS_S)]


@pytest.fixture(scope="module")
def texts(
    model: str, audios: Sequence[Samples], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    reference = StreamedReference(model, tmp_path_factory.mktemp("processors"))
    pairs = zip(audios, DELAYS_MS, strict=True)
    return [reference.decode(reference.generate(audio, delay_ms)) for audio, delay_ms in pairs]


def begin(server: ServerProcess, **fields: Any) -> Talker:
    talker = Talker(server.get_url(), OPENAI)
    talker.receive()
    answer = talker.set_input(format=PCM16K, **{"turn_detection": None, **fields})
    assert answer["type"] == "session.updated", answer
    return talker


def talk(server: ServerProcess, audio: Samples, delay: Any) -> tuple[str, str]:
    """Return the text of an item, and its deltas joined."""
    with begin(server, transcription={"delay": delay}) as talker:
        talker.say(audio, step=TOKEN)
        talker.commit()
        messages = talker.receive_until(f"{TRANSCRIPTION}.completed")
    deltas = [m["delta"] for m in messages if m["type"] == f"{TRANSCRIPTION}.delta"]
    return messages[-1]["transcript"], "".join(deltas)


def transcribe(server: ServerProcess, audio: Samples) -> str:
    answer = server.post(
        "/v1/audio/transcriptions",
        files={"file": ("sound.wav", write_audio(audio, "WAV", "PCM_16"))},
        data={"model": server.get("/v1/models").json()["data"][0]["id"]},
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


def wait_until_idle(server: ServerProcess) -> None:
    def is_idle() -> bool:
        metrics = server.get_metrics()
        running = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
        return metrics["sensorium:realtime_sessions_active"] + running == 0

    wait_until(is_idle, "nothing of a session is left")


def test_sessions_with_different_delays_run_together_with_files(
    server: ServerProcess, audios: list[Samples], texts: list[str]
) -> None:
    assert len(set(texts)) == len(texts)
    with ThreadPoolExecutor(12) as pool:
        talks = [
            pool.submit(talk, server, audio, delay)
            for audio, delay in zip(audios, DELAYS, strict=True)
        ]
        whole = [pool.submit(transcribe, server, audios[2]) for _ in range(3)]
        for task, text in zip(talks, texts, strict=True):
            assert task.result() == (text, text)
        assert {task.result() for task in whole} == {texts[2]}
    wait_until_idle(server)


def test_sessions_in_vllms_protocol_are_transcribed(
    server: ServerProcess, audios: list[Samples], texts: list[str]
) -> None:
    """Each recording has one text, also two recordings in one connection."""
    with Talker(server.get_url()) as talker:
        talker.receive()
        for number in (2, 7):
            talker.say(audios[number], step=TOKEN)
            talker.commit(final=True)
            messages = talker.receive_until("transcription.done")
            assert messages[-1]["text"] == texts[number]
            assert "".join(m.get("delta", "") for m in messages) == texts[number]
            seconds = messages[-1]["usage"]["seconds"]
            assert seconds == pytest.approx(len(audios[number]) / RATE, abs=0.001)


def test_text_comes_before_the_commit(server: ServerProcess, audios: list[Samples]) -> None:
    with begin(server) as talker:
        talker.say(audios[2], step=TOKEN)
        assert talker.receive()["type"] == f"{TRANSCRIPTION}.delta"
        talker.send("input_audio_buffer.clear")
        assert talker.receive_until("input_audio_buffer.cleared")
        talker.commit()
        answer = talker.receive()
        assert answer["error"]["code"] == "input_audio_buffer_commit_empty"
    wait_until_idle(server)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"delay": "short"}, "must be minimal"),
        ({"delay": 100}, "multiple of 80 ms"),
        ({"language": "en"}, "leave it out"),
        ({"prompt": "names"}, "leave it out"),
    ],
)
def test_options_that_the_model_can_not_take_are_refused(
    server: ServerProcess, fields: dict[str, Any], words: str
) -> None:
    with Talker(server.get_url(), OPENAI) as talker:
        talker.receive()
        answer = talker.set_input(transcription=fields)
        assert answer["type"] == "error"
        assert words in answer["error"]["message"]


@pytest.mark.parametrize(("delay", "words"), [("xhigh", ""), ("80", ""), ("100", "of 80 ms")])
def test_the_command_line_sends_the_delay(server: ServerProcess, delay: str, words: str) -> None:
    flags = ["--live", "-", "--url", server.get_url(), "--delay", delay]
    found = subprocess.run(
        [sys.executable, "-c", COMMAND, "transcribe", *flags],
        input=to_pcm16(make_tones(0, 1.0) * 0.0),
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert (found.returncode != 0) == bool(words), found.stderr
    assert words in found.stderr.decode()


def test_a_vanished_client_and_a_killed_core_end_no_other_session(
    model: str, audios: list[Samples], texts: list[str]
) -> None:
    """The item that was being spoken fails, and the session continues with the next core."""
    with serve(model, "--max-model-len", "1024") as server:
        gone = begin(server)
        gone.say(audios[0], step=TOKEN)
        gone.socket.socket.close()
        with begin(server) as talker:
            talker.say(audios[2][: 20 * TOKEN], step=TOKEN)
            talker.receive()
            (core,) = server.find_children("core")
            os.kill(core, signal.SIGKILL)
            failed = talker.receive_until(f"{TRANSCRIPTION}.failed")[-1]
            assert failed["error"]["code"] == "engine_lost"
            wait_until(lambda: server.get("/health").status_code == 200, "another core runs")
            talker.say(audios[2], step=TOKEN)
            talker.commit()
            done = talker.receive_until(f"{TRANSCRIPTION}.completed")[-1]
            assert done["transcript"] == texts[2]
        wait_until_idle(server)


def test_turn_detection_finds_no_turns_in_silence(server: ServerProcess) -> None:
    """Pure tones are no speech, so there is no turn and no text."""
    with begin(server, turn_detection={"type": "server_vad"}) as talker:
        talker.say(make_tones(3, 2.0) * 0.0, step=TOKEN)
        talker.send("session.update", session={"type": "transcription"})
        assert talker.receive()["type"] == "session.updated"
    wait_until_idle(server)
