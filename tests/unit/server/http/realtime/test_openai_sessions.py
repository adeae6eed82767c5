"""Live sessions in OpenAI's dialect over real WebSockets, also by the openai package."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import realtime

from sensorium.server.http.realtime.openai_dialect import (
    _Audio,
    _Format,
    _Input,
    _Session,
    _Transcription,
    _TurnDetection,
)
from sensorium.speech.options import SpeechOptions
from sensorium.types.errors import RequestError
from tests.support.talking import (
    LOUD,
    QUIET,
    Talker,
    make_tones,
    to_pcm16,
)
from tests.unit.server.http.realtime.clients import (
    COMPLETED,
    DELTA,
    OPENAI,
    PCM16K,
    SPOKEN,
    begin,
    get_types,
    wait_until_empty,
)
from tests.unit.server.standing_in import RunningServer
from tests.unit.server.transcribing import TEXT, TEXTS, ScriptedTranscriber


def test_speech_is_detected_and_transcribed(server: RunningServer) -> None:
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
            talker.say(make_tones((QUIET, seconds)))
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
            talker.say(make_tones((LOUD, 0.5)))
            talker.commit()
            talker.commit()
            kinds = get_types(talker.receive_until("error"))
        assert kinds[:2] == ["input_audio_buffer.committed", "conversation.item.added"]
    wait_until_empty(server, transcriber)


def test_cleared_audio_is_not_transcribed(
    server: RunningServer, transcriber: ScriptedTranscriber
) -> None:
    with begin(server, turn_detection=None) as talker:
        talker.say(make_tones((LOUD, 1.0)))
        talker.send("input_audio_buffer.clear")
        assert talker.receive()["type"] == "input_audio_buffer.cleared"
        talker.say(make_tones((LOUD, 0.5)))
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
            "transcription": {
                "model": "org/tiny",
                "language": None,
                "prompt": None,
                "delay": None,
            },
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
        assert changed["transcription"] == {
            "model": "org/tiny",
            "language": "fr",
            "prompt": "Ada",
            "delay": None,
        }
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
        talker.say(make_tones((LOUD, 0.5)))
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
    (
        {"turn_detection": {"type": "semantic_vad", "eagerness": "low"}},
        "turn_detection.type",
        "semantic_vad",
    ),
    (
        {"turn_detection": {"type": "server_vad", "eagerness": "low"}},
        "turn_detection.eagerness",
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


def test_options_that_the_model_can_not_take_are_refused_before_a_turn(
    server: RunningServer, transcriber: ScriptedTranscriber
) -> None:
    def refuse(options: SpeechOptions) -> None:
        if options.language is not None:
            raise RequestError("this model finds the language itself", path=("language",))

    transcriber.refuses = refuse
    with begin(server, turn_detection=None) as talker:
        error = talker.set_input(transcription={"prompt": "Ada", "language": "de"})["error"]
        assert error["param"] == "session.audio.input.transcription.language"
        assert "finds the language itself" in error["message"]
        talker.say(make_tones((LOUD, 0.5)))
        talker.commit()
        assert talker.receive_until(COMPLETED)[-1]["transcript"] == TEXT
    assert transcriber.calls[0][1].prompt == ""  # nothing of the message was taken


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"session": {"type": "transcription", "includes": []}}, "session.includes"),
    ({"session": {"type": "transcription", "instructions": "Hi"}}, "session.instructions"),
    ({"session": {"type": "transcription", "audio": {"in": 1}}}, "session.audio.in"),
    ({"session": {"type": "transcription"}, "sesion": {}}, "sesion"),
    ({"session": {"type": "transcription", "x` - at `$.y": 1}}, "session.x` - at `$.y"),
]
UNKNOWN_INPUT = [
    ({"transcriptions": {}}, "transcriptions"),
    ({"transcription": {"langauge": "de"}}, "transcription.langauge"),
    ({"turn_detection": {"type": "server_vad", "treshold": 0.5}}, "turn_detection.treshold"),
    ({"format": {"type": "audio/pcm", "channels": 2}}, "format.channels"),
]
UNKNOWN += [
    (
        {"session": {"type": "transcription", "audio": {"input": fields}}},
        f"session.audio.input.{path}",
    )
    for fields, path in UNKNOWN_INPUT
]


def test_fields_that_are_not_known_are_named(server: RunningServer) -> None:
    with Talker(server.url, OPENAI) as talker:
        before = talker.receive()["session"]
        for fields, param in UNKNOWN:
            talker.send("session.update", **fields, event_id="mine")
            error = talker.receive()["error"]
            assert (error["code"], error["param"]) == ("unknown_parameter", param)
            assert error["event_id"] == "mine"
        for kind in ("append", "commit", "clear"):
            audio = {"audio": ""} if kind == "append" else {}
            talker.send(f"input_audio_buffer.{kind}", **audio, fianl=True)
            error = talker.receive()["error"]
            assert (error["code"], error["param"]) == ("unknown_parameter", "fianl")
        assert talker.update()["session"] == before


def test_every_field_that_the_openai_package_has_is_known() -> None:
    turns = realtime.realtime_transcription_session_audio_input_turn_detection_param
    forms = realtime.realtime_audio_formats_param
    for struct, *types in (
        (_Session, realtime.RealtimeTranscriptionSessionCreateRequestParam),
        (_Audio, realtime.RealtimeTranscriptionSessionAudioParam),
        (_Input, realtime.RealtimeTranscriptionSessionAudioInputParam),
        (_Transcription, realtime.AudioTranscriptionParam),
        (_TurnDetection, turns.ServerVad, turns.SemanticVad),
        (_Format, forms.AudioPCM, forms.AudioPCMU, forms.AudioPCMA),
    ):
        for each in types:
            assert set(each.__annotations__) <= set(struct.__struct_fields__), each
    for each, fields in (
        (realtime.SessionUpdateEventParam, {"session"}),
        (realtime.InputAudioBufferAppendEventParam, {"audio"}),
        (realtime.InputAudioBufferCommitEventParam, set()),
        (realtime.InputAudioBufferClearEventParam, set()),
    ):
        assert set(each.__annotations__) == {"type", "event_id", *fields}


def test_a_message_of_the_other_dialect_is_named(server: RunningServer) -> None:
    with Talker(server.url, "?model=tiny") as talker:
        talker.receive()
        talker.send("session.update", model="tiny")
        assert "?dialect=vllm" in talker.receive()["error"]["message"]
        talker.commit(final=True)
        assert "?dialect=vllm" in talker.receive()["error"]["message"]


def test_other_sessions_than_transcriptions_are_refused(server: RunningServer) -> None:
    with Talker(server.url, OPENAI) as talker:
        talker.receive()
        session = {"type": "realtime", "instructions": "Answer."}
        talker.send("session.update", session=session, event_id="e1")
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
def test_audio_of_every_format_has_the_right_length(
    server: RunningServer, transcriber: ScriptedTranscriber, rate: int
) -> None:
    audio = make_tones((LOUD, 1.0), rate=rate)
    form = {"type": "audio/pcmu"} if rate == 8000 else {"type": "audio/pcm", "rate": rate}
    audio = make_mulaw(audio) if rate == 8000 else to_pcm16(audio)
    with begin(server, turn_detection=None) as talker:
        talker.set_input(format=form)
        for start in range(0, len(audio), 333):  # chunks end within samples
            talker.append(audio[start : start + 333])
        talker.commit()
        talker.receive_until(COMPLETED)
    received = np.frombuffer(transcriber.calls[0][0][44:], "<i2") / 32768
    assert len(received) == 16_000
    expected = make_tones((LOUD, 1.0))
    assert np.abs(received - expected)[500:-500].max() < 0.02


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
        audio = make_tones((QUIET, 0.5), (LOUD, 1.0), (QUIET, 1.0), rate=24_000)
        for start in range(0, len(audio), 2400):
            chunk = base64.b64encode(to_pcm16(audio[start : start + 2400])).decode()
            await connection.input_audio_buffer.append(audio=chunk)
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
        audio = to_pcm16(make_tones((LOUD, 0.5), rate=24_000))
        connection.input_audio_buffer.append(audio=base64.b64encode(audio).decode())
        connection.input_audio_buffer.commit()
        text = next(event.transcript for event in connection if event.type == COMPLETED)
        connection.input_audio_buffer.commit()
        error = next(event.error for event in connection if event.type == "error")
    assert text == TEXT
    assert isinstance(error, openai.types.realtime.RealtimeError)
    assert error.code == "input_audio_buffer_commit_empty"
