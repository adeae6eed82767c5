"""The `openai` client sends audio: every format, streams, bad uploads, clients that leave."""

from __future__ import annotations

import io
import os
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import av
import httpx
import numpy as np
import openai
import pytest
import srt
import webvtt
from openai import OpenAI

from tests.integration.fault_load import wait_until_idle
from tests.integration.speaking import SHORT_S, make_brief, make_wav
from tests.parity.cases import make_audio
from tests.support.media import make_clip, make_pixels, write_audio, write_image, write_video
from tests.support.server import ServerProcess, serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-speech")
MODEL = "tiny"
ROUTE = "/v1/audio/transcriptions"
SEED = {"seed": 1}
LANGUAGES = {"english", "german", "french", "chinese"}
LONG_S = 7.0
_MAX_UPLOAD_MB = 1
SHORT, LONG = make_wav(), make_wav(LONG_S)


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server, and the folder in which it may make temporary files."""

    server: ServerProcess
    folder: Path

    def send(self, audio: bytes = SHORT, path: str = ROUTE, **fields: str) -> httpx.Response:
        files = {"file": ("sound.wav", audio)}
        return httpx.post(self.server.get_url(path), data=fields, files=files, timeout=120.0)

    def list_files(self) -> list[str]:
        """Return the temporary files, with those that have no name and are open.

        Those of the metrics are not counted: they stay as long as the server runs.
        """
        paths = [path for path in self.folder.rglob("*") if path.parent.name != "metrics"]
        found = [str(path) for path in paths if path.is_file()]
        for pid in self.server.get_process_ids():
            for path in Path(f"/proc/{pid}/fd").glob("*"):
                try:
                    target = os.readlink(path)
                except OSError:
                    continue
                if target.startswith(f"{self.folder}/") and "/metrics/" not in target:
                    found.append(target)
        return found

    def wait_until_nothing_is_left(self) -> None:
        wait_until_idle(self.server)
        wait_until(lambda: self.list_files() == [], "no temporary file is left")

    def count(self, name: str) -> float:
        return self.server.get_metrics()[name]


@pytest.fixture(scope="module")
def served(
    tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    directory = make_brief(tiny_model("whisper"), tmp_path_factory.mktemp("speech") / "whisper")
    folder = tmp_path_factory.mktemp("temporary")
    flags = ("--served-model-name", MODEL, "--max-upload-mb", str(_MAX_UPLOAD_MB))
    with serve(str(directory), *flags, TMPDIR=str(folder)) as server:
        yield Served(server=server, folder=folder)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with served.server.make_client() as client:
        yield client


def transcribe(client: OpenAI, audio: bytes = SHORT, **fields: Any) -> Any:
    return client.audio.transcriptions.create(
        model=MODEL, file=("sound.wav", audio), extra_body=SEED, **fields
    )


def check_times(times: list[tuple[float, float]], duration_s: float) -> None:
    """Check that times are in order and within the audio.

    A subtitle ends at least a millisecond after its start, even if it starts at the audio's end.
    """
    assert times
    starts = [start for start, _ in times]
    assert starts == sorted(starts)
    assert all(0 <= start <= end <= duration_s + 0.0011 for start, end in times), times


# ---- formats


def test_every_format_has_the_same_text_and_times(client: OpenAI) -> None:
    whole = transcribe(client, LONG)
    assert whole.text
    assert whole.usage.input_token_details.audio_tokens >= 350  # of 20 ms
    assert transcribe(client, LONG, response_format="text") == whole.text + "\n"
    verbose = transcribe(
        client,
        LONG,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert (verbose.text, verbose.duration, verbose.usage.seconds) == (whole.text, LONG_S, 7)
    assert verbose.language in LANGUAGES
    assert "".join(segment.text for segment in verbose.segments).strip() == whole.text
    times = [(segment.start, segment.end) for segment in verbose.segments]
    check_times(times, LONG_S)
    check_times([(word.start, word.end) for word in verbose.words], LONG_S)
    shown = [segment for segment in verbose.segments if segment.text.strip()]

    cues = list(srt.parse(transcribe(client, LONG, response_format="srt")))
    assert [cue.start.total_seconds() for cue in cues] == pytest.approx([s.start for s in shown])
    check_times([(c.start.total_seconds(), c.end.total_seconds()) for c in cues], LONG_S)
    written = transcribe(client, LONG, response_format="vtt")
    captions = webvtt.from_string(written).captions
    assert [caption.start_in_seconds for caption in captions] == [int(s.start) for s in shown]
    assert len(captions) == len(cues)


def test_words_may_come_without_segments(client: OpenAI) -> None:
    answer = transcribe(client, response_format="verbose_json", timestamp_granularities=["word"])
    assert answer.segments is None
    check_times([(word.start, word.end) for word in answer.words], SHORT_S)


def test_log_probabilities_are_those_of_the_text(client: OpenAI) -> None:
    answer = transcribe(client, include=["logprobs"])
    # The client makes floats of the bytes.
    written = b"".join(bytes(map(int, entry.bytes)) for entry in answer.logprobs)
    assert written.decode(errors="replace").strip() == answer.text
    assert all(entry.logprob <= 0 for entry in answer.logprobs)


# ---- what was said


def test_a_language_is_given_found_or_unknown(client: OpenAI) -> None:
    found = transcribe(client, response_format="verbose_json").language
    assert found in LANGUAGES
    for given in ("fr", "French"):
        answer = transcribe(client, response_format="verbose_json", language=given)
        assert answer.language == "french"
    with pytest.raises(openai.BadRequestError, match="This model has: de, en, fr, zh") as caught:
        transcribe(client, language="ja")
    assert caught.value.param == "language"


def test_a_prompt_is_counted_and_changes_the_text(client: OpenAI) -> None:
    plain = transcribe(client)
    given = transcribe(client, prompt="the quick brown fox jumps over the lazy dog")
    assert plain.usage.input_token_details.text_tokens == 0
    assert given.usage.input_token_details.text_tokens > 0
    assert given.text != plain.text
    assert transcribe(client, prompt="the lazy dog " * 500).text  # its end is what is used
    with pytest.raises(openai.BadRequestError) as caught:
        transcribe(client, prompt="<|startoftranscript|>")
    assert caught.value.param == "prompt"


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # OpenAI's own route
def test_a_translation_is_english(client: OpenAI) -> None:
    answer: Any = client.audio.translations.create(
        model=MODEL,
        file=("sound.wav", LONG),
        response_format="verbose_json",
        temperature=1.0,  # at 0 this model ends its translations before the first word
        extra_body={"seed": 2},
    )
    assert (answer.to_dict()["task"], answer.language) == ("translate", "english")
    check_times([(segment.start, segment.end) for segment in answer.segments], LONG_S)


def test_the_same_seed_gives_the_same_text(client: OpenAI) -> None:
    def sample(seed: int) -> str:
        return client.audio.transcriptions.create(
            model=MODEL, file=("sound.wav", SHORT), temperature=0.5, extra_body={"seed": seed}
        ).text

    texts = [sample(seed) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1
    assert transcribe(client, temperature=0.0) == transcribe(client, temperature=0.0)


def test_eight_clients_at_once_get_what_each_gets_alone(client: OpenAI, served: Served) -> None:
    audios = [make_wav(0.5 + 0.3 * index, seed=20 + index) for index in range(8)]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda audio: transcribe(client, audio), audios))
    assert len({answer.text for answer in together}) > 2
    assert [transcribe(client, audio) for audio in audios] == together
    served.wait_until_nothing_is_left()


# ---- streams


def test_a_stream_is_the_whole_text(client: OpenAI) -> None:
    *deltas, done = [event.to_dict() for event in transcribe(client, LONG, stream=True)]
    whole = transcribe(client, LONG)
    assert [event["type"] for event in deltas] == ["transcript.text.delta"] * len(deltas)
    assert len(deltas) > 1
    assert "".join(event["delta"] for event in deltas) == done["text"] == whole.text
    assert done["usage"] == whole.usage.to_dict()


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_ends_its_transcript(served: Served, is_streamed: bool) -> None:
    """Only the windows that had begun are computed, of at least twenty."""
    aborted = 'vllm:request_success_total{finished_reason="abort"}'
    windows = 'sensorium:core_requests_total{finished_reason="stop"}'
    before, num_before = served.count(aborted), served.count(windows)
    audio = write_audio(make_audio(60.0, seed=40 + is_streamed), "WAV", "PCM_U8")
    request: dict[str, Any] = {
        "url": served.server.get_url(ROUTE),
        "files": {"file": ("sound.wav", audio)},
        "data": {"stream": str(is_streamed).lower()},
    }
    if is_streamed:
        with httpx.stream("POST", **request, timeout=120.0) as response:
            assert "transcript.text.delta" in next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(**request, timeout=httpx.Timeout(120.0, read=0.8))
    wait_until(lambda: served.count(aborted) == before + 1, "the transcript is aborted")
    served.wait_until_nothing_is_left()
    assert served.count(windows) - num_before < 18


# ---- caches and metrics


def test_a_recording_that_is_sent_again_is_neither_decoded_nor_encoded(
    client: OpenAI, served: Served
) -> None:
    levels = ("readonly", "processor", "transfer", "encoder")

    def count_misses() -> dict[str, float]:
        metrics = served.server.get_metrics()
        return {
            level: metrics[f'sensorium:cache_queries_total{{level="{level}"}}']
            - metrics[f'sensorium:cache_hits_total{{level="{level}"}}']
            for level in levels
        }

    audio = make_wav(seed=50)
    misses = count_misses()
    first = transcribe(client, audio)
    wait_until(
        lambda: all(count > misses[level] for level, count in count_misses().items()),
        "everything is computed once",
    )
    served.wait_until_nothing_is_left()
    known = count_misses()
    queries = 'sensorium:cache_queries_total{level="encoder"}'
    num_queries = served.count(queries)
    assert transcribe(client, audio) == first
    wait_until(lambda: served.count(queries) >= num_queries + 2, "the language and the text")
    served.wait_until_nothing_is_left()
    assert count_misses() == known


def test_a_transcript_counts_as_one_request(client: OpenAI, served: Served) -> None:
    names = (
        'vllm:request_success_total{finished_reason="stop"}',
        "vllm:e2e_request_latency_seconds_count",
        "vllm:time_to_first_token_seconds_count",
        "vllm:generation_tokens_total",
        "vllm:request_generation_tokens_sum",
        "vllm:request_prompt_tokens_sum",
    )
    before = served.server.get_metrics()
    usage = transcribe(client, LONG).usage
    after = served.server.get_metrics()
    num_in, num_out = usage.input_tokens, usage.output_tokens
    assert [after[name] - before[name] for name in names] == [1, 1, 1, num_out, num_out, num_in]


# ---- uploads


def claim_ten_hours(audio: bytes) -> bytes:
    """Return a WAV file with a header that announces ten hours of samples."""
    num_bytes = 10 * 3600 * 16_000 * 2
    return (
        audio[:4]
        + struct.pack("<I", num_bytes + 36)
        + audio[8:40]
        + struct.pack("<I", num_bytes)
        + audio[44:]
    )


def make_clip_with_audio() -> bytes:
    """Return a video with an audio track."""
    file = io.BytesIO()
    samples = make_audio(SHORT_S, seed=0)
    with av.open(file, "w", format="matroska") as container:
        pictures = container.add_stream("mpeg4", rate=10)
        pictures.height, pictures.width, pictures.pix_fmt = 32, 48, "yuv420p"
        track = container.add_stream("pcm_s16le", rate=16_000, layout="mono")
        for pixels in make_clip():
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            container.mux(pictures.encode(frame))
        container.mux(pictures.encode(None))
        values = (samples * 32767).astype(np.int16)[None]
        audio = av.AudioFrame.from_ndarray(values, format="s16", layout="mono")
        audio.sample_rate = 16_000
        container.mux(track.encode(audio))
        container.mux(track.encode(None))
    return file.getvalue()


FLAC = write_audio(make_audio(SHORT_S, seed=0), "FLAC", "PCM_16")


def claim_ten_hours_of_flac(audio: bytes) -> bytes:
    """Return a FLAC file. Its header announces ten hours of samples, and is trusted."""
    # The number of samples has 36 bits, from the middle of this byte on.
    start, number = 21, 10 * 3600 * 16_000
    first = (audio[start] & 0xF0) | (number >> 32)
    return audio[:start] + bytes([first]) + struct.pack(">I", number & 0xFFFFFFFF) + audio[26:]


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "text": (b"Dear server, this is a letter. " * 20, "can't be opened as audio"),
    "picture": (write_image(make_pixels(), "PNG"), "can't be opened as audio"),
    "silent film": (write_video(make_clip()), "no audio track"),
    "nothing": (b"", "is empty"),
    "only a header": (SHORT[:44], "no samples"),
    "truncated": (FLAC[: len(FLAC) // 2], "truncated or damaged"),
    "ten hours": (claim_ten_hours_of_flac(FLAC), "longer than"),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_file_without_usable_audio_is_refused(served: Served, name: str, stream: str) -> None:
    content, words = BAD_FILES[name]
    ended = 'vllm:request_success_total{finished_reason="error"}'
    num_ended = served.count(ended)
    response = served.send(content, stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "file"), error
    assert words in error["message"]
    assert served.count(ended) == num_ended
    served.wait_until_nothing_is_left()


def test_a_file_shorter_than_its_header_says_is_transcribed_to_its_end(client: OpenAI) -> None:
    """A header may announce more samples than there are, as that of a recording that was cut."""
    whole = transcribe(client, response_format="verbose_json")
    for audio in (claim_ten_hours(SHORT), make_clip_with_audio()):
        answer = transcribe(client, audio, response_format="verbose_json")
        assert answer.duration == pytest.approx(SHORT_S, abs=0.1)
        assert answer.language == whole.language
    half = transcribe(client, SHORT[: len(SHORT) // 2], response_format="verbose_json")
    assert half.duration == pytest.approx(SHORT_S / 2, abs=0.01)


def test_fields_that_are_wrong_are_named(served: Served) -> None:
    for fields, param in (
        ({"temperature": "hot"}, "temperature"),
        ({"response_format": "subtitles"}, "response_format"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"language": "klingon"}, "language"),
    ):
        response = served.send(**fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert served.send(model="whisper-1").status_code == 404
    served.wait_until_nothing_is_left()


def test_an_upload_that_is_too_large_is_refused(served: Served) -> None:
    response = served.send(bytes(_MAX_UPLOAD_MB * 2**20 + 1))
    assert response.status_code == 413
    assert "--max-upload-mb" in response.json()["error"]["message"]
    served.wait_until_nothing_is_left()
    assert served.send().status_code == 200


def test_an_upload_that_is_broken_off_leaves_nothing(served: Served) -> None:
    address = urlsplit(served.server.get_url())
    head = (
        f"POST {ROUTE} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000\r\n"
        "content-type: multipart/form-data; boundary=limit\r\n\r\n"
        '--limit\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    )
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port or 80)) as connection:
        connection.sendall(head.encode() + bytes(600_000))
        wait_until(lambda: served.list_files() != [], "the upload is on the disk")
    served.wait_until_nothing_is_left()
    assert served.send().status_code == 200


# ---- other routes


MESSAGES = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/chat/completions", MESSAGES, 400, ROUTE),
        ("/v1/completions", {"prompt": "Hello"}, 400, ROUTE),
        ("/tokenize", {"prompt": "Hello"}, 400, "exactly one audio item"),
        ("/tokenize", MESSAGES, 400, "no chat template"),
        ("/detokenize", {"tokens": [10, 11]}, 200, "prompt"),
        ("/v1/chat/completions/render", MESSAGES, 400, "no chat template"),
        ("/v1/completions/render", {"prompt": "Hello"}, 400, "exactly one audio item"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}, 400, "one audio"),
    ],
)
def test_other_routes_refuse_or_answer_clearly(
    served: Served, path: str, body: Any, status: int, words: str
) -> None:
    response = served.server.post(path, body)
    assert response.status_code == status, response.text
    assert words in response.text


def test_the_model_card_has_its_capabilities(client: OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.to_dict()["capabilities"] == ["transcription", "translation", "realtime"]
