"""The `openai` client sends audio to a model that chats: the embedded one, with a pool."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
import srt
from openai import OpenAI

import sensorium.embedded
from sensorium.speech.pieces import find_cuts
from tests.integration.fault_load import wait_until_idle
from tests.parity.cases import make_audio
from tests.support.media import make_pixels, write_audio, write_image
from tests.support.server import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("mini")
MODEL = "sensorium-mini"
ROUTE = "/v1/audio/transcriptions"
RATE = 16_000
SPEECH = (Path(sensorium.embedded.__file__).parent / "media" / "speech.flac").read_bytes()
SAID = "seven green birds"


def make_long(num_times: int) -> bytes:
    """Make a file in which the same words are said every 10 seconds."""
    words, rate = soundfile.read(io.BytesIO(SPEECH), dtype="float32")
    assert rate == RATE
    piece = np.zeros(10 * RATE, dtype=np.float32)
    piece[: len(words)] = words
    return write_audio(np.tile(piece, num_times), "FLAC", "PCM_16")


LONG, LONG_S = make_long(7), 70.0
NUM_PIECES = 9  # a piece ends at the first silence after 8 s


@pytest.fixture
def server(mini_server: ServerProcess) -> ServerProcess:
    mini_server.reset_caches()
    return mini_server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with server.make_client() as client:
        yield client


def transcribe(client: OpenAI, audio: bytes = SPEECH, **fields: Any) -> Any:
    return client.audio.transcriptions.create(model=MODEL, file=("sound.flac", audio), **fields)


def test_speech_is_transcribed_in_every_format(client: OpenAI) -> None:
    whole = transcribe(client)
    assert whole.text == SAID
    details = whole.usage.input_token_details
    assert details.audio_tokens + details.text_tokens == whole.usage.input_tokens
    assert details.audio_tokens > 0 < details.text_tokens
    assert whole.usage.output_tokens > 0
    assert transcribe(client, response_format="text") == SAID + "\n"
    verbose = transcribe(client, response_format="verbose_json")
    assert (verbose.text, verbose.language) == (SAID, "english")
    (segment,) = verbose.segments
    assert (segment.text, segment.start, segment.end) == (SAID, 0.0, verbose.duration)
    (cue,) = srt.parse(transcribe(client, response_format="srt"))
    assert cue.content == SAID
    scored = transcribe(client, include=["logprobs"])
    written = b"".join(bytes(map(int, entry.bytes)) for entry in scored.logprobs)
    assert written.decode().strip() == SAID
    assert all(entry.logprob <= 0 for entry in scored.logprobs)


def test_long_audio_is_transcribed_like_chats_about_its_pieces(client: OpenAI) -> None:
    samples, _ = soundfile.read(io.BytesIO(LONG), dtype="float32")
    cuts = find_cuts(samples, RATE, max_s=12.0)
    assert len(cuts) == NUM_PIECES
    expected = []
    for start, end in cuts:
        audio = base64.b64encode(write_audio(samples[start:end], "WAV", "FLOAT")).decode()
        content: Any = [
            {"type": "input_audio", "input_audio": {"data": audio, "format": "wav"}},
            {"type": "text", "text": "Write down what you hear."},
        ]
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}], temperature=0
        )
        expected.append(str(answer.choices[0].message.content).strip())
    verbose = transcribe(client, LONG, response_format="verbose_json")
    assert [segment.text.strip() for segment in verbose.segments] == expected
    times = [(segment.start, segment.end) for segment in verbose.segments]
    assert times == [pytest.approx((start / RATE, end / RATE)) for start, end in cuts]
    assert verbose.text == " ".join(expected)
    assert verbose.duration == LONG_S


def test_a_stream_has_a_delta_for_each_piece(client: OpenAI) -> None:
    events = list(transcribe(client, LONG, stream=True))
    *deltas, done = events
    assert [event.type for event in deltas] == ["transcript.text.delta"] * NUM_PIECES
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas) == done.text
    assert done.usage.output_tokens > 0


def test_the_same_file_again_finds_its_pieces(server: ServerProcess, client: OpenAI) -> None:
    first = transcribe(client, LONG)
    before = server.get_metrics()
    assert transcribe(client, LONG).text == first.text

    def has_counted() -> bool:
        after = server.get_metrics()
        names = ("vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total")
        return [after[name] - before[name] for name in names] == [NUM_PIECES, NUM_PIECES]

    wait_until(has_counted, "every piece is found in the cache")


def test_a_file_whose_pieces_were_dropped_is_decoded_again(
    server: ServerProcess, client: OpenAI
) -> None:
    first = transcribe(client, LONG)
    server.reset_caches()
    assert transcribe(client, LONG).text == first.text


def test_salts_share_nothing(server: ServerProcess, client: OpenAI) -> None:
    assert transcribe(client, extra_body={"cache_salt": "one"}).text == SAID
    before = server.get_metrics()["vllm:mm_cache_hits_total"]
    assert transcribe(client, extra_body={"cache_salt": "two"}).text == SAID
    assert transcribe(client, extra_body={"cache_salt": "two"}).text == SAID
    after = "vllm:mm_cache_hits_total"
    wait_until(lambda: server.get_metrics()[after] == before + 1, "only the last one is a hit")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "de"}, "language"),
        ({"prompt": "Names: Ann"}, "prompt"),
        (
            {"response_format": "verbose_json", "timestamp_granularities": ["word"]},
            "timestamp_granularities",
        ),
    ],
)
def test_unsupported_options_are_refused(
    client: OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        transcribe(client, **fields)
    assert raised.value.param == param


@pytest.mark.parametrize("audio", [b"no sound", write_image(make_pixels(8, 8), "PNG")])
def test_files_without_audio_are_refused(client: OpenAI, audio: bytes) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        transcribe(client, audio)
    assert raised.value.param == "file"


def test_the_model_chats_and_transcribes_but_does_not_translate(
    server: ServerProcess, client: OpenAI
) -> None:
    (card,) = client.models.list().data
    expected = ["chat", "completions", "transcription", "realtime"]
    assert card.to_dict()["capabilities"] == expected
    refused = server.post("/v1/audio/translations", files={"file": ("sound.flac", SPEECH)})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_route")
    assert "does not translate" in refused.json()["error"]["message"]


def test_a_client_that_leaves_ends_its_transcript(server: ServerProcess) -> None:
    aborted = 'vllm:request_success_total{finished_reason="abort"}'
    before = server.get_metrics()[aborted]
    request: dict[str, Any] = {"files": {"file": ("sound.flac", make_long(40))}}
    url = server.get_url(ROUTE)
    with httpx.stream("POST", url, data={"stream": "true"}, **request, timeout=120.0) as response:
        assert "transcript.text.delta" in next(response.iter_lines())
    wait_until(lambda: server.get_metrics()[aborted] == before + 1, "the transcript is aborted")
    wait_until_idle(server)


@pytest.mark.slow
def test_frontends_that_share_a_cache_share_the_pieces(shared_server: ServerProcess) -> None:
    """Each of the two frontends gets the file at some time, and finds what the other has made."""
    audio = write_audio(make_audio(40.0, seed=5), "WAV", "PCM_16")
    hits = "vllm:mm_cache_hits_total"
    texts = set()
    before = shared_server.get_metrics()[hits]
    for _ in range(6):
        response = shared_server.post(ROUTE, files={"file": ("sound.wav", audio)})
        assert response.status_code == 200, response.text
        texts.add(response.json()["text"])
    assert len(texts) == 1
    wait_until(
        lambda: shared_server.get_metrics()[hits] == before + 10, "five times two pieces are found"
    )
