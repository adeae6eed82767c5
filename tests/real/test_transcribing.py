"""Human speech through `LLM.transcribe` with Whisper tiny.en, against Transformers' own.

Both run in float32 on the CPU. Words, times of words and segments have to be those of Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from real_models.speech import RATE, get_recordings
from sensorium import LLM
from sensorium.speech.transcript import Transcript
from sensorium.speech.whisper_tokens import WhisperSettings
from tests.real.hearing import count_errors, get_error_rate, normalize, read_samples
from tests.real.transcribing import (
    LONG_S,
    LongSpeech,
    LongTranscript,
    Transcriber,
    make_long_speech,
)
from tests.support.engine import make_llm

MAX_MODEL_LEN = 448
MAX_TIME_DIFFERENCE_S = 0.1
SHORTER_S = 120.0
# The settings of `Transcriber.transcribe_long`: no window is decoded again.
PLAIN = WhisperSettings(
    temperatures=(0.0,),
    max_compression_ratio=None,
    min_avg_logprob=None,
    max_no_speech_prob=None,
    condition_on_prev_tokens=False,
)


@pytest.fixture(scope="module")
def transcriber(real_folder: Callable[[str], Path]) -> Transcriber:
    return Transcriber(real_folder("whisper"))


@pytest.fixture(scope="module")
def recordings(real_folder: Callable[[str], Path]) -> dict[Path, str]:
    return get_recordings(real_folder("speech"))


@pytest.fixture(scope="module")
def book(recordings: dict[Path, str]) -> dict[Path, str]:
    """The sentences that Whisper understands. It does not understand most hands of cards."""
    return {path: words for path, words in recordings.items() if "librivox" in path.name}


@pytest.fixture(scope="module")
def llm(real_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with make_llm(str(real_folder("whisper")), max_model_len=MAX_MODEL_LEN) as llm:
        yield llm


@contextmanager
def using(llm: LLM, settings: WhisperSettings) -> Iterator[None]:
    speech = llm._speech
    assert speech is not None
    llm._speech = replace(speech, settings=settings)
    try:
        yield
    finally:
        llm._speech = speech


def transcribe(llm: LLM, speech: LongSpeech) -> Transcript:
    (transcript,) = llm.transcribe([(speech.samples, RATE)], use_tqdm=False)
    return transcript


def assert_same_segments(ours: Transcript, theirs: LongTranscript, duration_s: float) -> None:
    assert [segment.text for segment in ours.segments] == [each.text for each in theirs.segments]
    for segment, expected in zip(ours.segments, theirs.segments, strict=True):
        # Transformers lets the last times of a window exceed the audio.
        assert segment.start == pytest.approx(min(expected.start_s, duration_s), abs=0.011)
        assert segment.end == pytest.approx(min(expected.end_s, duration_s), abs=0.011)


def test_words_are_those_of_the_pipeline(
    llm: LLM, transcriber: Transcriber, recordings: dict[Path, str]
) -> None:
    found = llm.transcribe([str(path) for path in recordings], use_tqdm=False)
    for path, transcript in zip(recordings, found, strict=True):
        assert transcript.text == transcriber.transcribe(read_samples(path)).strip(), path.name


def test_words_have_the_times_of_the_pipeline(
    llm: LLM, transcriber: Transcriber, recordings: dict[Path, str]
) -> None:
    found = llm.transcribe([str(path) for path in recordings], use_tqdm=False, needs_words=True)
    for path, transcript in zip(recordings, found, strict=True):
        words = [word for segment in transcript.segments for word in segment.words]
        expected = transcriber.time_words(read_samples(path))
        assert [word.text for word in words] == [each.text.strip() for each in expected], path.name
        for word, other in zip(words, expected, strict=True):
            difference = max(abs(word.start - other.start_s), abs(word.end - other.end_s))
            assert difference <= MAX_TIME_DIFFERENCE_S, (path.name, word, other)


def test_segments_of_two_minutes_are_those_of_transformers(
    llm: LLM, transcriber: Transcriber, book: dict[Path, str]
) -> None:
    """With our own settings, errors may exceed theirs by a fiftieth of the words."""
    speech = make_long_speech(book, duration_s=SHORTER_S)
    theirs = transcriber.transcribe_long(speech.samples, is_conditioned=False)
    with using(llm, PLAIN):
        assert_same_segments(transcribe(llm, speech), theirs, SHORTER_S)
    ours = transcribe(llm, speech)
    errors = count_errors(normalize(ours.text), speech.words)
    expected = count_errors(normalize(theirs.text), speech.words)
    assert errors <= expected + len(speech.words.split()) // 50, ours.text


@pytest.mark.slow
def test_segments_of_ten_minutes_are_those_of_transformers(
    llm: LLM, transcriber: Transcriber, recordings: dict[Path, str]
) -> None:
    """With our own settings, errors may exceed theirs by a fiftieth of the words."""
    speech = make_long_speech(recordings)
    theirs = transcriber.transcribe_long(speech.samples, is_conditioned=False)
    with using(llm, PLAIN):
        assert_same_segments(transcribe(llm, speech), theirs, LONG_S)
    ours = transcribe(llm, speech)
    texts = [normalize(ours.text)], [normalize(theirs.text)]
    rate, expected = (get_error_rate(text, [speech.words]) for text in texts)
    assert rate <= expected + 0.02, ours.text
