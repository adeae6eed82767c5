"""Live sessions in vLLM's dialect over real WebSockets."""

from __future__ import annotations

import time

import pytest

from tests.support.talking import (
    LOUD,
    QUIET,
    Talker,
    make_tones,
)
from tests.unit.server.http.realtime.clients import (
    SPOKEN,
    get_types,
)
from tests.unit.server.standing_in import RunningServer
from tests.unit.server.transcribing import TEXT


def test_the_other_dialect_has_one_text_for_the_whole_audio(server: RunningServer) -> None:
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
        # Another audio may follow.
        talker.say(make_tones((QUIET, 0.2), (LOUD, 0.5)))
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
        for kind in ("session.update", "input_audio_buffer.commit", "input_audio_buffer.clear"):
            talker.send(kind, language="de")
            assert talker.receive() == {
                "type": "error",
                "error": "language: is an unknown field",
                "code": "unknown_parameter",
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


def test_a_message_of_the_other_dialect_is_named(server: RunningServer) -> None:
    with Talker(server.url) as talker:
        talker.receive()
        talker.send("session.update", session={"type": "transcription"})
        assert "?intent=transcription" in talker.receive()["error"]
