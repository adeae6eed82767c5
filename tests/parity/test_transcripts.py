"""Transcripts of the engine have the segments of Transformers' `generate`, token by token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sensorium import LLM, SamplingParams
from sensorium.engine.speech.models import WhisperModel
from sensorium.speech.transcript import Transcript
from sensorium.speech.whisper_tokens import WhisperSettings
from tests.parity.cases import Audio, make_audio
from tests.support.engine import Trace, assert_nothing_is_left, make_llm

RATE = 16_000
PLAIN = WhisperSettings(
    temperatures=(0.0,),
    max_compression_ratio=None,
    min_avg_logprob=None,
    max_no_speech_prob=None,
    condition_on_prev_tokens=False,
)
CARRIED = replace(PLAIN, condition_on_prev_tokens=True)

TinyModel = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Options of a transcript, in our words and in those of Transformers."""

    ours: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, Any] = field(default_factory=dict)


SEGMENTS = {"needs_segments": True}
TIMES = {"return_timestamps": True}
LANGUAGE = {"language": "de", "task": "transcribe"}
QUESTIONS = {
    "without times": Question(ours=LANGUAGE, theirs=LANGUAGE),
    "with times": Question(ours=LANGUAGE | SEGMENTS, theirs=LANGUAGE | TIMES),
    "another language": Question(
        ours={"language": "chinese"}, theirs={"language": "zh", "task": "transcribe"}
    ),
    "a translation": Question(
        ours={"language": "fr", "task": "translate"} | SEGMENTS,
        theirs={"language": "fr", "task": "translate"} | TIMES,
    ),
    "a language that is found": Question(
        ours=SEGMENTS, theirs={"language": None, "task": "transcribe"} | TIMES
    ),
    "a prompt": Question(
        ours=LANGUAGE | SEGMENTS | {"prompt": "the quick brown fox"},
        theirs=LANGUAGE | TIMES | {"prompt": "the quick brown fox"},
    ),
}

IN_EVERY_RUN = ("without times", "a language that is found", "a prompt")


class Whisper:
    """A tiny Whisper in Transformers, and in an engine."""

    def __init__(self, directory: str, **options: Any) -> None:
        self.directory = directory
        self.options = options  # of the engine
        self.processor = transformers.AutoProcessor.from_pretrained(directory)

    @cached_property
    def model(self) -> Any:
        loaded = transformers.WhisperForConditionalGeneration.from_pretrained(self.directory)
        return loaded.eval()

    @cached_property
    def llm(self) -> LLM:
        return make_llm(self.directory, max_model_len=None, **self.options)

    def transcribe(
        self, audios: list[Audio], settings: WhisperSettings, **options: Any
    ) -> list[Transcript]:
        """Transcribe with some settings, and with the lengths of the generation config."""
        speech = self.llm._speech
        assert isinstance(speech, WhisperModel)
        lengths = {
            name: getattr(speech.settings, name) for name in ("max_new_tokens", "max_length")
        }
        self.llm._speech = replace(speech, settings=replace(settings, **lengths))
        entries = [(audio, RATE) for audio in audios]
        return self.llm.transcribe(entries, use_tqdm=False, **options)

    @torch.inference_mode()
    def generate(
        self, audio: Audio, settings: WhisperSettings, *, prompt: str = "", **options: Any
    ) -> list[list[int]]:
        """Return the tokens of the segments that have a text."""
        extractor, is_long = self.processor.feature_extractor, len(audio) > 3 * RATE
        whole = {"truncation": False, "padding": "longest"} if is_long else {}
        features = extractor(audio, sampling_rate=RATE, return_tensors="pt", **whole)
        if prompt:
            ids = self.processor.get_prompt_ids(prompt, return_tensors="pt")
            options["prompt_ids"] = ids
        output = self.model.generate(
            features["input_features"],
            return_segments=True,
            temperature=settings.temperatures,
            condition_on_prev_tokens=settings.condition_on_prev_tokens,
            **options,
        )
        return [
            segment["tokens"].tolist()
            for segment in output["segments"][0]
            if self._has_text(segment["tokens"].tolist())
        ]

    @torch.inference_mode()
    def find_language(self, audio: Audio) -> str:
        """Return the code of the language that Transformers finds in a window."""
        features = self.processor.feature_extractor(audio, sampling_rate=RATE, return_tensors="pt")
        found = self.model.detect_language(features["input_features"], num_segment_frames=300)
        token: str = self.processor.tokenizer.decode(found)
        return token.removeprefix("<|").removesuffix("|>")

    def _has_text(self, token_ids: list[int]) -> bool:
        first_special = self.model.config.eos_token_id
        text = [token_id for token_id in token_ids if token_id < first_special]
        return bool(self.processor.tokenizer.decode(text).strip())


@pytest.fixture(scope="module")
def whisper(tiny_model: TinyModel) -> Whisper:
    return Whisper(tiny_model("whisper"))


def get_tokens(transcript: Transcript) -> list[list[int]]:
    return [list(segment.token_ids) for segment in transcript.segments]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow)
        for name in QUESTIONS
    ],
)
def test_recordings_of_one_window_have_the_reference_segments(name: str, whisper: Whisper) -> None:
    question = QUESTIONS[name]
    audios = [make_audio(3.0, seed=seed) for seed in range(2)]
    transcripts = whisper.transcribe(audios, PLAIN, **question.ours)
    expected = [whisper.generate(audio, PLAIN, **question.theirs) for audio in audios]
    assert list(map(get_tokens, transcripts)) == expected
    assert any(expected)
    assert_nothing_is_left(whisper.llm)


@pytest.mark.parametrize(
    "settings",
    [pytest.param(PLAIN, id="alone", marks=pytest.mark.slow), pytest.param(CARRIED, id="carried")],
)
def test_long_recordings_have_the_reference_segments(
    settings: WhisperSettings, whisper: Whisper
) -> None:
    """Several windows each, and the windows of several recordings together."""
    check_long(whisper, settings, [4.0, 7.1])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [PLAIN, CARRIED], ids=["alone", "carried"])
def test_three_minutes_have_the_reference_segments(
    settings: WhisperSettings, whisper: Whisper
) -> None:
    check_long(whisper, settings, [180.0, 181.3])


def check_long(whisper: Whisper, settings: WhisperSettings, lengths: list[float]) -> None:
    audios = [make_audio(seconds, seed=60 + index) for index, seconds in enumerate(lengths)]
    trace = Trace(whisper.llm)
    transcripts = whisper.transcribe(audios, settings, **LANGUAGE)
    expected = [whisper.generate(audio, settings, **LANGUAGE, **TIMES) for audio in audios]
    assert list(map(get_tokens, transcripts)) == expected
    assert all(len(segments) > 1 for segments in expected)
    assert trace.most_requests_in_a_step == len(audios)
    for transcript in transcripts:
        times = [time for each in transcript.segments for time in (each.start, each.end)]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] <= transcript.duration_s


def make_changed(source: str, directory: Path, **changes: Any) -> str:
    """Make a copy of a checkpoint with another generation config."""
    shutil.copytree(source, directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(directory)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_new_tokens": 5},
        {"max_length": 7},
        pytest.param({"max_length": 30}, marks=pytest.mark.slow),
        {"max_length": 4, "max_new_tokens": 9},
        pytest.param({"max_length": 9, "max_new_tokens": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_lengths_of_a_generation_config_hold(
    limits: dict[str, int], tiny_model: TinyModel, tmp_path: Path
) -> None:
    whisper = Whisper(make_changed(tiny_model("whisper"), tmp_path / "limited", **limits))
    short, long = make_audio(2.9, seed=3), make_audio(7.1, seed=61)
    prompt = {"prompt": "the quick brown fox"}
    cases: list[tuple[Audio, WhisperSettings, dict[str, Any], dict[str, Any]]] = [
        (short, PLAIN, LANGUAGE, LANGUAGE),
        (short, PLAIN, LANGUAGE | SEGMENTS | prompt, LANGUAGE | TIMES | prompt),
        (long, PLAIN, LANGUAGE, LANGUAGE | TIMES),
        (long, CARRIED, LANGUAGE | prompt, LANGUAGE | TIMES | prompt),
    ]
    for audio, settings, ours, theirs in cases:
        (transcript,) = whisper.transcribe([audio], settings, **ours)
        expected = whisper.generate(audio, settings, **theirs)
        assert get_tokens(transcript) == expected
        assert any(expected)
        first = [len(segment.token_ids) for segment in transcript.segments if segment.seek == 0]
        assert sum(first) <= limits.get("max_new_tokens", limits.get("max_length", 0))


@pytest.mark.parametrize("name", ["suppress_tokens", "begin_suppress_tokens"])
def test_a_language_is_found_though_a_text_may_not_have_its_token(
    name: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = Whisper(tiny_model("whisper"))
    config = source.model.generation_config
    audios = [make_audio(3.0, seed=seed) for seed in range(4)]
    expected = [source.find_language(audio) for audio in audios]
    # All languages that are found, so that there would be another one for each recording.
    banned = [config.lang_to_id[f"<|{code}|>"] for code in sorted(set(expected))]
    assert len(banned) < len(config.lang_to_id)
    changes = {name: [*getattr(config, name), *banned]}
    whisper = Whisper(make_changed(source.directory, tmp_path / "banned", **changes))
    transcripts = whisper.transcribe(audios, PLAIN, **SEGMENTS)
    assert [transcript.language for transcript in transcripts] == expected
    assert [whisper.find_language(audio) for audio in audios] == expected
    theirs = {"language": None, "task": "transcribe"} | TIMES
    assert list(map(get_tokens, transcripts)) == [
        whisper.generate(audio, PLAIN, **theirs) for audio in audios
    ]


def test_tokens_that_a_whisper_never_writes_stay_suppressed_without_its_config(
    whisper: Whisper, tiny_model: TinyModel
) -> None:
    without = Whisper(tiny_model("whisper"), generation_config="none")
    audios = [make_audio(seconds, seed=seed) for seed, seconds in enumerate((3.0, 4.0))]
    transcripts = without.transcribe(audios, PLAIN, **LANGUAGE, **SEGMENTS)
    assert list(map(get_tokens, transcripts)) == [
        whisper.generate(audio, PLAIN, **LANGUAGE, **TIMES) for audio in audios
    ]
    assert_nothing_is_left(without.llm)


def test_an_english_model_has_the_reference_segments(tiny_model: TinyModel) -> None:
    whisper = Whisper(tiny_model("whisper_en"))
    audios = [make_audio(seconds, seed=70 + seconds) for seconds in (3, 8)]
    transcripts = whisper.transcribe(audios, PLAIN, **SEGMENTS)
    assert list(map(get_tokens, transcripts)) == [
        whisper.generate(audio, PLAIN, **TIMES) for audio in audios
    ]
    assert [transcript.language for transcript in transcripts] == ["en", "en"]


@torch.inference_mode()
def test_pieces_of_a_moonshine_have_the_reference_tokens(tiny_model: TinyModel) -> None:
    directory = tiny_model("moonshine")
    audio = make_audio(40.0, seed=90)
    (transcript,) = make_llm(directory, max_model_len=None).transcribe(
        (audio, RATE), use_tqdm=False, sampling=SamplingParams(ignore_eos=True)
    )
    model = transformers.MoonshineForConditionalGeneration.from_pretrained(directory).eval()
    model.generation_config.eos_token_id = None
    assert len(transcript.segments) == 2
    assert transcript.segments[0].end == transcript.segments[1].start
    for segment in transcript.segments:
        piece = audio[round(segment.start * RATE) : round(segment.end * RATE)]
        expected = model.generate(
            torch.from_numpy(piece)[None], max_new_tokens=len(segment.token_ids), do_sample=False
        )
        assert list(segment.token_ids) == expected[0, 1:].tolist()


def test_the_same_audio_again_is_not_encoded_again(whisper: Whisper) -> None:
    audios = [make_audio(5.0, seed=80)]
    first = whisper.transcribe(audios, PLAIN, **LANGUAGE)
    trace = Trace(whisper.llm)
    assert whisper.transcribe(audios, PLAIN, **LANGUAGE) == first
    assert trace.num_encoded_items == 0
    assert whisper.transcribe(audios, PLAIN, **LANGUAGE, needs_words=True)[0].segments[0].words
    assert trace.num_encoded_items == 0
