"""Streaming audio in a cluster: each session stays on its engine, with one server's transcript."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.test_server_streams import (
    DELAYS,
    LENGTHS_S,
    TRANSCRIPTION,
    begin,
    talk,
    transcribe,
    wait_until_idle,
)
from tests.support.server import ServerProcess, get_command, get_descendants, kill, serve
from tests.support.tones import TOKEN, make_tones

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.slow]
_FLAGS = ("--max-model-len", "1024", "--max-num-seqs", "16")


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], str]) -> str:
    return tiny_model("voxtral_realtime")


@pytest.fixture(scope="module")
def streaming(model: str) -> Iterator[ServerProcess]:
    """Run two engines of a model that writes while one speaks."""
    flags = ("--replicas", "2", "--frontends", "1", *_FLAGS)
    with serve(model, *flags, command="deploy", is_cold=True) as server:
        yield server


def test_sessions_are_transcribed_as_by_one_server(model: str, streaming: ServerProcess) -> None:
    audios = [make_tones(seed, seconds) for seed, seconds in enumerate(LENGTHS_S[:5])]
    with serve(model, *_FLAGS) as single:
        expected = [talk(single, each, d) for each, d in zip(audios, DELAYS, strict=False)]
        whole = transcribe(single, audios[2])
    with ThreadPoolExecutor(6) as threads:
        pairs = zip(audios, DELAYS, strict=False)
        talks = [threads.submit(talk, streaming, each, delay) for each, delay in pairs]
        again = threads.submit(transcribe, streaming, audios[2])
        assert [each.result() for each in talks] == expected
        assert again.result() == whole
    wait_until_idle(streaming)


def test_a_session_continues_after_its_engine_was_killed(streaming: ServerProcess) -> None:
    audio = make_tones(3, 2.0)
    expected = talk(streaming, audio, None)
    with begin(streaming) as talker:
        talker.say(audio, step=TOKEN)
        talker.receive_until(f"{TRANSCRIPTION}.delta")
        for pid in get_descendants(streaming.process.pid):
            if "ServeReplica:sensorium:Engine" in get_command(pid):
                kill(pid)
        talker.say(audio, step=TOKEN)
        talker.commit()
        *_, failed = talker.receive_until(f"{TRANSCRIPTION}.failed")
        assert "engine" in failed["error"]["message"]
        talker.say(audio, step=TOKEN)
        talker.commit()
        *_, last = talker.receive_until(f"{TRANSCRIPTION}.completed")
        assert last["transcript"] == expected[0]
    wait_until_idle(streaming)
