"""Speech over HTTP, with OpenAI's client and a scripted transcriber."""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import schemathesis
import srt
import webvtt
from hypothesis import HealthCheck, given, settings
from openai import OpenAI
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from sensorium.types.errors import CapacityError, RequestError
from sensorium.types.model_kind import Task
from tests.support.waiting import wait_until
from tests.unit.server import transcribing
from tests.unit.server.standing_in import RunningServer, ScriptedEngine, read_events, serve
from tests.unit.server.transcribing import TEXT, TEXTS, ScriptedTranscriber

TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
AUDIO = ("sound.wav", b"RIFF\r\n--and so on" * 1000)
LOGPROBS = [
    {"token": text, "logprob": -0.25 * index, "bytes": list(text.encode())}
    for index, text in enumerate(TEXTS)
]


@pytest.fixture(scope="module")
def transcriber() -> ScriptedTranscriber:
    return ScriptedTranscriber()


@pytest.fixture(scope="module")
def server(transcriber: ScriptedTranscriber) -> Iterator[RunningServer]:
    with serve(transcriber=transcriber) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(running: RunningServer, path: str = TRANSCRIPTIONS, **fields: Any) -> httpx.Response:
    return running.post(path, data=fields, files={"file": AUDIO})


def check_refused(response: httpx.Response, param: str | None, words: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


def test_json_is_the_default(client: OpenAI, transcriber: ScriptedTranscriber) -> None:
    answer = client.audio.transcriptions.create(model="tiny", file=AUDIO)
    assert answer.text == TEXT
    assert answer.usage is not None
    assert answer.usage.to_dict() == {
        "type": "tokens",
        "input_tokens": 1504,
        "input_token_details": {"text_tokens": 4, "audio_tokens": 1500},
        "output_tokens": 9,
        "total_tokens": 1513,
    }
    media, options, salt = transcriber.calls[-1]
    assert (media, options.task, salt) == (AUDIO[1], "transcribe", None)
    assert (options.needs_segments, options.needs_words, options.needs_logprobs) == (False,) * 3


def test_log_probabilities_come_if_asked_for(client: OpenAI) -> None:
    answer = client.audio.transcriptions.create(model="tiny", file=AUDIO, include=["logprobs"])
    assert answer.logprobs is not None
    assert [entry.to_dict() for entry in answer.logprobs] == LOGPROBS


def test_verbose_json_has_segments_and_words(client: OpenAI) -> None:
    answer = client.audio.transcriptions.create(
        model="tiny",
        file=AUDIO,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert (answer.text, answer.language, answer.duration) == (TEXT, "german", 4.25)
    assert [segment.text for segment in answer.segments or ()] == list(TEXTS)
    assert [word.word for word in answer.words or ()] == [text.strip() for text in TEXTS]
    assert answer.usage is not None
    assert answer.usage.to_dict() == {"type": "duration", "seconds": 5}


def test_segments_are_the_default_of_verbose_json(client: OpenAI) -> None:
    create = client.audio.transcriptions.create
    plain = create(model="tiny", file=AUDIO, response_format="verbose_json")
    assert plain.segments is not None
    assert plain.words is None
    only_words = create(
        model="tiny",
        file=AUDIO,
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    assert only_words.segments is None
    assert only_words.words is not None


def test_text_ends_with_a_line(client: OpenAI) -> None:
    answer: Any = client.audio.transcriptions.create(
        model="tiny", file=AUDIO, response_format="text"
    )
    assert answer == TEXT + "\n"


def test_subtitles_are_read_again(client: OpenAI, transcriber: ScriptedTranscriber) -> None:
    create: Any = client.audio.transcriptions.create
    cues = list(srt.parse(create(model="tiny", file=AUDIO, response_format="srt")))
    assert [cue.content for cue in cues] == [text.strip().replace("-->", "->") for text in TEXTS]
    assert [cue.start.total_seconds() for cue in cues] == [0, 1.5, 3]
    written = create(model="tiny", file=AUDIO, response_format="vtt")
    captions = webvtt.from_string(written).captions
    assert [html.unescape(caption.raw_text) for caption in captions] == [
        text.strip() for text in TEXTS
    ]
    assert transcriber.calls[-1][1].needs_segments


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # OpenAI's own route
@pytest.mark.parametrize("form", ["json", "text", "srt", "vtt", "verbose_json"])
def test_a_translation_has_every_format(
    client: OpenAI, transcriber: ScriptedTranscriber, form: Any
) -> None:
    answer: Any = client.audio.translations.create(
        model="org/tiny", file=AUDIO, response_format=form, prompt="Ada", temperature=0.5
    )
    assert "wörds" in (answer if isinstance(answer, str) else answer.text)
    if form == "verbose_json":
        assert (answer.language, len(answer.segments)) == ("english", 3)
    options = transcriber.calls[-1][1]
    assert (options.task, options.prompt, options.temperature) == ("translate", "Ada", 0.5)


def test_all_fields_reach_the_transcriber(client: OpenAI, transcriber: ScriptedTranscriber) -> None:
    client.audio.transcriptions.create(
        model="tiny",
        file=AUDIO,
        language="en",
        prompt="Ada, Grüße",
        temperature=0.25,
        chunking_strategy="auto",
        extra_body={
            "seed": 7,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "presence_penalty": -1,
            "frequency_penalty": 1e-1,
            "cache_salt": "pepper",
            "stream_include_usage": True,
        },
    )
    _, options, salt = transcriber.calls[-1]
    assert (options.language, options.prompt, options.temperature) == ("en", "Ada, Grüße", 0.25)
    sampling = options.sampling
    assert (sampling.seed, sampling.top_p, sampling.top_k) == (7, 0.5, 3)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 0.1)
    assert (sampling.temperature, salt) == (None, "pepper")


def test_an_empty_text_is_no_value(server: RunningServer, transcriber: ScriptedTranscriber) -> None:
    response = post(server, language="", temperature="", stream="", response_format="", seed="")
    assert response.json()["text"] == TEXT
    options = transcriber.calls[-1][1]
    assert (options.language, options.temperature) == (None, None)


@pytest.mark.parametrize("yields_segments", [True, False])
def test_a_stream_has_a_delta_for_each_segment_and_the_whole(yields_segments: bool) -> None:
    scripted = ScriptedTranscriber(yields_segments=yields_segments)
    with (
        serve(transcriber=scripted) as running,
        OpenAI(base_url=f"{running.url}/v1", api_key="none") as client,
    ):
        stream = client.audio.transcriptions.create(
            model="tiny", file=AUDIO, stream=True, include=["logprobs"]
        )
        *deltas, done = [event.to_dict() for event in stream]
    assert {delta["type"] for delta in deltas} == {"transcript.text.delta"}
    texts = [delta["delta"] for delta in deltas]
    assert texts == ([TEXTS[0].lstrip(), *TEXTS[1:]] if yields_segments else [TEXT])
    assert [entry for delta in deltas for entry in delta["logprobs"]] == LOGPROBS
    assert (done["type"], done["text"]) == ("transcript.text.done", TEXT)
    assert (done["usage"]["total_tokens"], done["logprobs"]) == (1513, LOGPROBS)
    assert scripted.num_aborted == scripted.num_open == 0


def test_deltas_are_the_whole_text_together(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ("  ", " One. ", "", "\n", "Two. ")
    monkeypatch.setattr(transcribing, "TEXTS", texts)
    with serve(transcriber=ScriptedTranscriber()) as running:
        *deltas, done = map(json.loads, read_events(post(running, stream="true"))[:-1])
    assert [delta["delta"] for delta in deltas] == ["One.", " \nTwo."]
    assert done["text"] == "One. \nTwo."


def test_events_of_a_stream_follow_their_schema(server: RunningServer) -> None:
    response = post(server, stream="true", response_format="text")
    *events, done = read_events(response)
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    schema = {"$ref": "#/components/schemas/TranscriptEvent", "components": {"schemas": schemas}}
    for event in events:
        jsonschema.validate(json.loads(event), schema)
        assert "logprobs" not in json.loads(event)
    assert (len(events), done) == (4, "[DONE]")
    assert response.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("form", ["json", "verbose_json"])
def test_answers_follow_their_schema(server: RunningServer, form: str) -> None:
    document = server.get("/openapi.json").json()
    operation = document["paths"][TRANSCRIPTIONS]["post"]
    content = operation["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/plain", "text/event-stream"}
    assert list(operation["requestBody"]["content"]) == ["multipart/form-data"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    fields = {"timestamp_granularities": ["segment", "word"]} if form == "verbose_json" else {}
    jsonschema.validate(post(server, response_format=form, **fields).json(), schema)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "xml"}, "response_format", "json, text, srt, verbose_json or vtt"),
        ({"response_format": "diarized_json"}, "response_format", "diarized_json"),
        ({"temperature": "warm"}, "temperature", "must be a number, not 'warm'"),
        ({"temperature": "nan"}, "temperature", "must be a number"),
        ({"temperature": "1_0"}, "temperature", "must be a number"),
        ({"temperature": "1e999"}, "temperature", "at most 100"),
        ({"temperature": "-1"}, "temperature", "at least 0"),
        ({"seed": "1.5"}, "seed", "must be an integer, not '1.5'"),
        ({"seed": "9" * 20}, "seed", "at most"),
        ({"top_p": "2"}, "top_p", "at most 1"),
        ({"stream": "maybe"}, "stream", "must be true or false"),
        ({"language": ["en", "de"]}, "language", "is given twice"),
        ({"language[]": ["en", "de"]}, "language", "must be text, not a list"),
        ({"stream": "true", "response_format": "srt"}, "response_format", "can't be streamed"),
        ({"stream": "true", "response_format": "vtt"}, "response_format", "can't be streamed"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "verbose_json"),
        ({"timestamp_granularities": "word"}, "timestamp_granularities", "verbose_json"),
        (
            {"timestamp_granularities": ["word", "page"], "response_format": "verbose_json"},
            "timestamp_granularities[1]",
            "must be segment or word, not 'page'",
        ),
        ({"include[]": "speakers"}, "include[0]", "must be logprobs"),
        ({"include": "logprobs", "response_format": "text"}, "include", "to be json"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, "chunking_strategy", "other than auto"),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy", "other than auto"),
        ({"known_speaker_names[]": ["Ada"]}, "known_speaker_names", "not supported"),
        ({"known_speaker_references[]": ["data:,"]}, "known_speaker_references", "not supported"),
        ({"to_language": "fr"}, "to_language", "not supported"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens", "not supported"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    server: RunningServer, fields: dict[str, Any], param: str, words: str
) -> None:
    check_refused(post(server, **fields), param, words)


def test_an_object_of_the_openai_client_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="chunking_strategy"):
        client.audio.transcriptions.create(
            model="tiny", file=AUDIO, chunking_strategy={"type": "server_vad"}
        )


def test_the_model_is_checked(server: RunningServer) -> None:
    response = post(server, model="gpt-4o-transcribe")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_an_unknown_field_is_ignored_and_a_misspelt_one_is_named(server: RunningServer) -> None:
    response = post(server, vad_filter="on", langauge="en")
    assert response.json()["text"] == TEXT
    assert "did you mean 'language'" in response.headers["x-sensorium-warning"]


def test_the_file_must_be_there_once_and_have_content(server: RunningServer) -> None:
    url = f"{server.url}{TRANSCRIPTIONS}"
    none = httpx.post(url, files={"model": (None, "tiny")})
    check_refused(none, "file", "is missing")
    text = httpx.post(url, files={"file": (None, "talk.mp3")})
    check_refused(text, "file", "no file name")
    head = "--b\r\nContent-Disposition: form-data; name="
    body = f"{head}file; filename*=UTF-8''%e2%82%ac.mp3\r\n\r\n".encode() + AUDIO[1]
    body += f"\r\n{head}model\r\n\r\ntiny\r\n--b--\r\n".encode()
    kind = {"content-type": "multipart/form-data; boundary=b"}
    assert httpx.post(url, content=body, headers=kind, timeout=120).json()["text"] == TEXT
    check_refused(httpx.post(url, files={"file": ("a.wav", b"")}), "file", "is empty")
    twice = [("file", AUDIO), ("file", AUDIO)]
    check_refused(httpx.post(url, files=twice), "file", "is given twice")
    other = [("file", AUDIO), ("second", AUDIO)]
    check_refused(httpx.post(url, files=other), "second", "only the field file")
    response = httpx.post(url, json={"file": "data:,"})
    assert response.json()["error"]["code"] == "unsupported_content_type"
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("missing", "path", "fields", "param", "words"),
    [
        ("can_translate", TRANSLATIONS, {}, "model", "/v1/audio/transcriptions"),
        ("has_segments", TRANSCRIPTIONS, {"response_format": "srt"}, "response_format", "json"),
        ("has_segments", TRANSLATIONS, {"response_format": "vtt"}, "response_format", "json"),
        (
            "has_segments",
            TRANSCRIPTIONS,
            {"response_format": "verbose_json"},
            "response_format",
            "",
        ),
        (
            "has_words",
            TRANSCRIPTIONS,
            {"response_format": "verbose_json", "timestamp_granularities": "word"},
            "timestamp_granularities",
            "times of words",
        ),
    ],
)
def test_what_the_model_can_not_do_is_refused(
    missing: str, path: str, fields: dict[str, str], param: str, words: str
) -> None:
    scripted = ScriptedTranscriber(**{missing: False})
    with serve(transcriber=scripted) as running:
        check_refused(post(running, path, **fields), param, words)
    assert scripted.calls == []


def test_a_model_that_can_not_transcribe_names_the_right_route() -> None:
    with serve() as running:
        for path in (TRANSCRIPTIONS, TRANSLATIONS):
            check_refused(post(running, path), "model", "Use /v1/chat/completions")
    with serve(ScriptedEngine(modalities=("audio",))) as running:
        check_refused(post(running), "model", "`input_audio` in messages to /v1/chat/completions")


def test_a_model_that_only_transcribes_names_the_right_route() -> None:
    with serve(transcriber=ScriptedTranscriber(), tasks=frozenset({"transcription"})) as running:
        for response in (running.chat(), running.complete()):
            check_refused(response, "model", "/v1/audio/transcriptions")
        assert post(running).status_code == 200
    with serve(tasks=frozenset()) as running:
        assert "/v1/chat" not in post(running).json()["error"]["message"]


@pytest.mark.parametrize(
    "capabilities",
    [
        ["transcription", "translation", "realtime"],
        ["transcription"],
        ["chat", "completions", "transcription"],
    ],
)
def test_the_model_card_says_what_the_model_can_do(capabilities: list[Task]) -> None:
    engine = ScriptedEngine(modalities=("audio",))
    with serve(engine, transcriber=ScriptedTranscriber(), tasks=frozenset(capabilities)) as running:
        (card, *_) = running.get("/v1/models").json()["data"]
    assert card["capabilities"] == capabilities


def test_a_server_that_refuses_audio_does_not_announce_transcription() -> None:
    engine = ScriptedEngine(modalities=("image",))
    with serve(engine, transcriber=ScriptedTranscriber()) as running:
        (card, *_) = running.get("/v1/models").json()["data"]
    assert card["capabilities"] == ["chat", "completions"]


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (RequestError("is no sound"), 400, "file"),
        (RequestError("is no sound", path=("multi_modal_data", "audio", 0)), 400, "file"),
        (RequestError("is not known", path=("language",)), 400, "language"),
        (CapacityError("no room"), 503, None),
        (ValueError("a bug"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", ["true", "false"])
def test_an_error_before_the_first_text_has_its_status(
    error: Exception, status: int, param: str | None, stream: str
) -> None:
    def fail(_: int) -> None:
        raise error

    scripted = ScriptedTranscriber(between=fail)
    with serve(transcriber=scripted) as running:
        response = post(running, stream=stream)
        assert running.metrics.ends == ({"error": 1} if status == 500 else {})
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert scripted.num_open == 0


def test_an_error_after_the_first_text_is_an_event() -> None:
    def fail(index: int) -> None:
        if index == 1:
            raise RequestError("is cut off")

    with serve(transcriber=ScriptedTranscriber(between=fail)) as running:
        first, error, done = read_events(post(running, stream="true"))
        assert json.loads(first)["delta"] == TEXTS[0].lstrip()
        assert json.loads(error)["error"]["param"] == "file"
        assert done == "[DONE]"
        with (
            OpenAI(base_url=f"{running.url}/v1", api_key="none") as client,
            pytest.raises(openai.APIError, match="is cut off"),
        ):
            list(client.audio.transcriptions.create(model="tiny", file=AUDIO, stream=True))


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_leaves_aborts_its_transcription(stream: str) -> None:
    async def wait(index: int) -> None:
        if index == 1:
            await asyncio.Event().wait()

    scripted = ScriptedTranscriber(between=wait)
    with serve(transcriber=scripted) as running:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{running.url}{TRANSCRIPTIONS}",
                data={"stream": stream},
                files={"file": AUDIO},
                timeout=httpx.Timeout(60, read=0.5),
            )
        wait_until(lambda: scripted.num_aborted == 1, "the transcription goes on")
        wait_until(lambda: running.metrics.load == 0, "the request is still counted")
        assert scripted.num_open == 0
        assert running.metrics.ends == {"abort": 1}
        assert running.metrics.transcripts == []


def test_a_transcript_is_counted_once() -> None:
    with serve(transcriber=ScriptedTranscriber()) as running:
        for stream in ("true", "false"):
            post(running, stream=stream)
        usages = running.metrics.transcripts
        assert [usage.num_output_tokens for usage in usages] == [9, 9]
        assert running.metrics.num_segments == 8  # the transcript is the last part of each
        assert (running.metrics.ends, running.metrics.stages) == ({}, {"parse": 2})


def test_responses_are_counted_by_their_route() -> None:
    with serve(transcriber=ScriptedTranscriber()) as running:
        post(running)
        post(running, TRANSLATIONS, seed="x")
        wait_until(lambda: len(running.metrics.responses) == 2, "a response is not counted")
        assert running.metrics.responses == {
            (TRANSCRIPTIONS, "POST", 200): 1,
            (TRANSLATIONS, "POST", 400): 1,
        }
        assert running.metrics.refusals == {"bad_request": 1}


def test_a_page_of_another_origin_may_not_send_forms(server: RunningServer) -> None:
    """Browsers send forms to other origins without asking, so the origin alone protects."""
    for headers in ({"origin": "https://example.com"}, {"sec-fetch-site": "cross-site"}):
        response = server.post(TRANSCRIPTIONS, files={"file": AUDIO}, headers=headers)
        assert response.status_code == 403


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", [TRANSCRIPTIONS, TRANSLATIONS])
def test_requests_made_from_the_document_get_documented_answers(
    server: RunningServer, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=120)
    strategy = schema[path]["POST"].as_strategy(generation_mode=mode)
    statuses: set[int] = set()

    @settings(
        max_examples=min(25, settings().max_examples),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def check(case: schemathesis.Case) -> None:
        response = case.call(timeout=60)
        statuses.add(response.status_code)
        checks = (not_a_server_error, status_code_conformance, content_type_conformance)
        case.validate_response(response, checks=checks)

    check()
    assert 200 in statuses or mode is GenerationMode.NEGATIVE
    assert 400 in statuses or mode is GenerationMode.POSITIVE
