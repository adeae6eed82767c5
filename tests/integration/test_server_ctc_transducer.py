"""The `openai` client sends audio to servers of CTC/transducer models."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import srt
from openai import OpenAI

from tests.integration.fault_load import wait_until_idle
from tests.parity.cases import make_audio
from tests.parity.ctc_transducer_reference import CtcTransducerReference
from tests.support.media import write_audio
from tests.support.server import ServerProcess, serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-ctc-transducer")
MODEL = "tiny"
ROUTE = "/v1/audio/transcriptions"
FAMILIES = ("wav2vec2", "parakeet_tdt")
SHORT_S, LONG_S = 2.5, 42.0


def make_file(seconds: float = SHORT_S, *, seed: int = 0) -> bytes:
    return write_audio(make_audio(seconds, seed=seed), "WAV", "FLOAT")


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tiny_model: Callable[[str], str]) -> str:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def server(directory: str) -> Iterator[ServerProcess]:
    with serve(directory, "--served-model-name", MODEL) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with server.make_client() as client:
        yield client


def transcribe(client: OpenAI, audio: bytes, **fields: Any) -> Any:
    return client.audio.transcriptions.create(model=MODEL, file=("sound.wav", audio), **fields)


def test_every_format_has_the_same_text_and_times(client: OpenAI, directory: str) -> None:
    audio = make_file()
    expected = CtcTransducerReference(directory).transcribe(make_audio(SHORT_S, seed=0)).text
    whole = transcribe(client, audio, include=["logprobs"])
    assert whole.text == expected
    assert all(entry.logprob <= 0 for entry in whole.logprobs)
    assert len(whole.logprobs) == whole.usage.output_tokens
    assert transcribe(client, audio, response_format="text") == expected + "\n"
    verbose = transcribe(
        client, audio, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert (verbose.text, verbose.duration, verbose.language) == (expected, SHORT_S, "unknown")
    assert [word.word.strip() for word in verbose.words] == expected.split()
    times = [time for word in verbose.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= SHORT_S
    cues = list(srt.parse(transcribe(client, audio, response_format="srt")))
    starts = [cue.start.total_seconds() for cue in cues]
    assert starts == pytest.approx([s.start for s in verbose.segments], abs=0.001)


@pytest.mark.slow
def test_long_audio_is_streamed_piece_by_piece(client: OpenAI) -> None:
    audio = make_file(LONG_S)
    *deltas, done = [event.to_dict() for event in transcribe(client, audio, stream=True)]
    whole = transcribe(client, audio)
    assert len(deltas) > 1
    assert "".join(event["delta"] for event in deltas) == done["text"] == whole.text
    assert done["usage"] == whole.usage.to_dict()


def test_eight_clients_and_bad_files_at_once_are_answered(
    client: OpenAI, server: ServerProcess
) -> None:
    """Each of the eight gets what it gets alone, and each bad file a 400 of its own."""
    audios = [make_file(0.5 + 0.3 * index, seed=20 + index) for index in range(8)]
    bad = [b"no sound at all", write_audio(make_audio(1.0, seed=1)[:100], "WAV", "FLOAT")]

    def fail(content: bytes) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            transcribe(client, content)
        assert caught.value.param == "file"
        return str(caught.value)

    with ThreadPoolExecutor(10) as threads:
        failures = [threads.submit(fail, content) for content in bad]
        together = list(threads.map(lambda audio: transcribe(client, audio), audios))
    assert "can't be opened as audio" in failures[0].result()
    assert "too short" in failures[1].result()
    assert len({answer.text for answer in together}) == len(audios)
    assert [transcribe(client, audio) for audio in audios] == together
    wait_until_idle(server)


def test_a_recording_that_is_sent_again_is_neither_decoded_nor_encoded(
    client: OpenAI, server: ServerProcess
) -> None:
    def count(what: str) -> dict[str, float]:
        metrics = server.get_metrics()
        levels = ("readonly", "processor", "transfer", "encoder")
        return {
            level: metrics[f'sensorium:cache_{what}_total{{level="{level}"}}'] for level in levels
        }

    def count_misses() -> dict[str, float]:
        hits = count("hits")
        return {level: number - hits[level] for level, number in count("queries").items()}

    audio = make_file(LONG_S, seed=50)  # in two pieces
    misses = count_misses()
    first = transcribe(client, audio)
    wait_until(
        lambda: all(number > misses[level] for level, number in count_misses().items()),
        "everything is computed once",
    )
    wait_until_idle(server)
    known, num_queries = count_misses(), count("queries")["encoder"]
    assert transcribe(client, audio) == first
    wait_until(lambda: count("queries")["encoder"] >= num_queries + 2, "both pieces are asked for")
    wait_until_idle(server)
    assert count_misses() == known


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "en"}, "language"),
        ({"prompt": "Names: Ada, Grace"}, "prompt"),
        ({"temperature": 0.7}, "temperature"),
    ],
)
def test_options_that_the_model_can_not_take_are_refused(
    client: OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError, match="this model") as caught:
        transcribe(client, make_file(), **fields)
    assert caught.value.param == param
    assert transcribe(client, make_file(), temperature=0.0).text


@pytest.mark.parametrize(
    ("name", "value"), [("logprobs", 2), ("structured_outputs", {"regex": "a+"})]
)
def test_sampling_parameters_are_refused(server: ServerProcess, name: str, value: Any) -> None:
    """An answer without what was asked for would leave its client waiting, and others as well."""
    audio = base64.b64encode(make_file()).decode()
    body = {
        "token_ids": [0],
        "content_parts": [{"type": "audio_url", "url": f"data:audio/wav;base64,{audio}"}],
        "sampling_params": {"max_tokens": 1},
    }
    assert server.post("/inference/v1/generate", body).status_code == 200
    body["sampling_params"] = {"max_tokens": 1, name: value}
    response = server.post("/inference/v1/generate", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"sampling_params.{name}"
    wait_until_idle(server)


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # OpenAI's own route
def test_other_routes_name_the_right_one(client: OpenAI, server: ServerProcess) -> None:
    (model,) = httpx.get(server.get_url("/v1/models")).json()["data"]
    assert model["capabilities"] == ["transcription", "realtime"]
    with pytest.raises(openai.BadRequestError, match=ROUTE):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError, match=ROUTE):
        client.completions.create(model=MODEL, prompt="Hi")
    with pytest.raises(openai.BadRequestError, match=ROUTE):
        client.audio.translations.create(model=MODEL, file=("sound.wav", make_file()))
