"""Sentences keep to the vocabulary and to their split; synthesizers speak where they lie."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from training.free_speech import read_sentences, score
from training.samples import Split
from training.speech import espeak, flite, heard, sentences
from training.speech.kinds import is_random_string
from training.speech.resample import resample
from training.speech.test_voices import fits_vocabulary, human_recordings
from training.speech.words import UNCLEAR_ALONE, VOCABULARY
from training.vocabulary import make_page

ASSETS = Path(__file__).parents[3] / "build" / "training"
NUM_SENTENCES = 3000

needs_espeak = pytest.mark.skipif(not (ASSETS / "espeak").exists(), reason="no espeak-ng here")
needs_flite = pytest.mark.skipif(not (ASSETS / "flite").exists(), reason="no flite here")
needs_recordings = pytest.mark.skipif(
    not (ASSETS / "recordings").exists(), reason="no recordings here"
)


def make_sentences(split: Split) -> list[str]:
    generator = random.Random(0)
    return [sentences.make_sentence(generator, split) for _ in range(NUM_SENTENCES)]


@pytest.mark.parametrize(("split", "num_words"), [("train", 22), ("test", 10)])
def test_sentences_are_a_few_words_of_the_vocabulary(split: Split, num_words: int) -> None:
    made = make_sentences(split)
    assert {word for sentence in made for word in sentence.split()} <= set(VOCABULARY)
    assert {len(sentence.split()) for sentence in made} == set(range(1, num_words + 1))


def test_training_and_test_share_no_sentence() -> None:
    training = set(make_sentences("train"))
    assert not training & set(make_sentences("test"))
    assert not training & sentences.HUMAN_SENTENCES


def test_held_out_sentences_are_no_part_of_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = next(sentence for sentence in make_sentences("test") if sentence.count(" ") == 3)
    other = next(sentence for sentence in make_sentences("train") if sentence.count(" ") == 3)
    monkeypatch.setattr(sentences, "make_any_sentence", lambda random: random.choice((kept, other)))
    made = make_sentences("train")
    assert any(len(sentence.split()) > 10 for sentence in made)
    assert not any(kept in sentence for sentence in made)


def test_what_training_has_said_inside_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, rare = "turn left", "week tiger prudently sun clubs moves egg"
    assert heard.find_heard({inside, rare}, num_said=5000) == {inside}
    kept = next(sentence for sentence in make_sentences("test") if sentence.count(" ") == 3)
    other = next(sentence for sentence in make_sentences("train") if sentence.count(" ") == 3)
    monkeypatch.setattr(heard, "make_any_sentence", lambda random: random.choice((kept, other)))
    assert heard.find_heard({kept}, num_said=200) == {kept}  # never alone: in long ones
    monkeypatch.setattr(heard, "LONG_SHARE", 0.0)
    assert heard.find_heard({kept, other}, num_said=200) == {other}


def test_sentences_are_distinguished_from_random_strings() -> None:
    generator = random.Random(0)
    for name, (_, make) in sentences.KINDS.items():
        made = {make(generator) for _ in range(100)}
        share = sum(map(is_random_string, made)) / len(made)
        assert share > 0.9 if name == "random words" else share == 0.0, name


def test_the_vocabulary_is_closed_and_every_pattern_keeps_to_it() -> None:
    assert 350 <= len(VOCABULARY) <= 500
    assert list(VOCABULARY) == sorted(set(VOCABULARY))
    assert set(VOCABULARY) >= UNCLEAR_ALONE
    generator = random.Random(0)
    for pattern in sentences.PATTERNS:
        assert set(sentences.fill(pattern, generator).split()) <= set(VOCABULARY), pattern


def test_every_word_is_spoken_in_training() -> None:
    generator = random.Random(0)
    spoken: set[str] = set()
    for _ in range(20000):
        spoken.update(sentences.make_sentence(generator, "train").split())
    assert spoken == set(VOCABULARY)


def test_numbers_are_words() -> None:
    assert sentences.number_in_words(7) == "seven"
    assert sentences.number_in_words(40) == "forty"
    assert sentences.number_in_words(113) == "one hundred thirteen"


@pytest.mark.parametrize("source", [8000, 22050, 24000])
def test_a_tone_keeps_its_pitch_and_height_at_another_rate(source: int) -> None:
    tone = 1000 * np.sin(2 * np.pi * 440 * np.arange(source) / source)
    expected = 1000 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    resampled = resample(tone, source)
    assert len(resampled) == 16000
    assert np.abs(resampled - expected)[200:-200].max() < 10


def test_what_16_khz_cannot_hold_is_taken_away() -> None:
    tone = 1000 * np.sin(2 * np.pi * 9500 * np.arange(22050) / 22050)
    assert np.abs(resample(tone, 22050))[200:-200].max() < 20


def test_test_voices_are_never_training_voices() -> None:
    assert len(espeak.TEST_VARIANTS) >= 8
    assert not set(espeak.TEST_VARIANTS) & set(espeak.VARIANTS)
    generator = random.Random(0)
    voices = [espeak.make_voice(generator, "train") for _ in range(500)]
    assert not {voice.variant for voice in voices} & set(espeak.TEST_VARIANTS)


@needs_espeak
def test_espeak_has_every_voice() -> None:
    synthesizer = espeak.Espeak(ASSETS / "espeak")  # an unknown variant would be the plain voice
    names = {path.name for path in (ASSETS / "espeak").glob("*/espeak-ng-data/voices/!v/*")}
    assert (set(espeak.VARIANTS) | set(espeak.TEST_VARIANTS)) - {""} <= names
    for accent in espeak.ACCENTS:
        audio = synthesizer.speak("turn left", espeak.Voice(accent=accent, variant="f1"))
        assert audio.dtype == np.int16
        assert 0.3 < len(audio) / 16000 < 2.0
        assert np.abs(audio).max() > 1000


@needs_flite
def test_flite_speaks_with_every_voice_and_slower_when_asked() -> None:
    synthesizer = flite.Flite(ASSETS / "flite")
    for name in synthesizer.names:
        audio = synthesizer.speak("turn left", flite.FliteVoice(name=name))
        slower = synthesizer.speak("turn left", flite.FliteVoice(name=name, stretch=1.5))
        assert audio.dtype == np.int16
        assert np.abs(audio).max() > 1000
        assert len(slower) > 1.2 * len(audio)


@needs_recordings
def test_human_recordings_are_held_out_and_fit_the_vocabulary() -> None:
    recordings = human_recordings(ASSETS / "recordings")
    assert len(recordings) == 11
    for _, audio, transcript in recordings:
        assert audio.dtype == np.int16
        assert fits_vocabulary(transcript)
        assert sentences.is_test_sentence(transcript)


def test_free_sentences_use_every_word_and_fit_no_pattern() -> None:
    free = read_sentences()
    assert len(set(free)) == len(free) == 200
    assert {word for sentence in free for word in sentence.split()} == set(VOCABULARY)
    assert [sentence for sentence in free if not is_random_string(sentence)] == []
    assert {len(sentence.split()) for sentence in free} <= set(range(4, 13))


def test_homophones_are_counted_separately() -> None:
    figures = score(["two birds are here", "i know"], ["to birds are there", "eye no"])
    assert (figures["words"], figures["words_wrong"]) == (6, 4)
    assert figures["word_errors_without_sound_alikes"] == pytest.approx(1 / 6, abs=1e-4)
    assert figures["sentences_right"] == 0


def test_the_page_of_words_and_emoji_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs" / "sensorium-mini-words.md"
    assert page.read_text() == make_page()
