"""Whisper's checkpoint is complete: Transformers' own classes and its pipeline load and run it.

No engine takes part. The same pipeline is the reference for one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from real_models.speech import RATE, get_recordings
from tests.real.hearing import MAX_ERROR_RATE, get_error_rate, normalize, read_samples
from tests.real.transcribing import LONG_S, Transcriber, make_long_speech, tf

SPECIAL = {
    "<|endoftext|>": 50256,
    "<|startoftranscript|>": 50257,
    "<|en|>": 50258,
    "<|su|>": 50356,
    "<|translate|>": 50357,
    "<|transcribe|>": 50358,
    "<|startoflm|>": 50359,
    "<|startofprev|>": 50360,
    "<|nospeech|>": 50361,
    "<|notimestamps|>": 50362,
}
FIRST_TIME, LAST_TIME = 50363, 51863


@pytest.fixture(scope="module")
def directory(real_folder: Callable[[str], Path]) -> Path:
    return real_folder("whisper")


@pytest.fixture(scope="module")
def transcriber(directory: Path) -> Transcriber:
    return Transcriber(directory)


@pytest.fixture(scope="module")
def recordings(real_folder: Callable[[str], Path]) -> dict[Path, str]:
    return get_recordings(real_folder("speech"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return tf.WhisperTokenizerFast.from_pretrained(directory)


def test_every_class_that_reads_the_folder_finds_the_same(directory: Path, tokenizer: Any) -> None:
    for loader in (tf.AutoProcessor, tf.WhisperProcessor):
        processor = loader.from_pretrained(directory)
        assert type(processor) is tf.WhisperProcessor
        assert processor.tokenizer.backend_tokenizer.to_str() == tokenizer._tokenizer.to_str()
        assert processor.feature_extractor.feature_size == 80
    for loader in (tf.AutoFeatureExtractor, tf.WhisperFeatureExtractor):
        extractor = loader.from_pretrained(directory)
        assert extractor.to_dict() == processor.feature_extractor.to_dict()


def test_tokens_have_openais_numbers(tokenizer: Any) -> None:
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL} == SPECIAL
    assert tokenizer.all_special_ids == [*range(50256, FIRST_TIME)]
    assert tokenizer.timestamp_ids() == [*range(FIRST_TIME, LAST_TIME + 1)]
    assert len(tokenizer) == LAST_TIME + 1
    # Known numbers of GPT-2's tokens.
    assert tokenizer.encode("Hello, world!", add_special_tokens=False) == [15496, 11, 995, 0]
    assert tokenizer("hello").input_ids == [50257, 50362, 31373, 50256]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " He was not ill-disposed.",
        "\n\t 1,024  spaces ",
        "naïve café",
        "日本語 🎵",
        "we're it's",
    ],
)
def test_text_comes_back_from_its_tokens(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert max(ids, default=0) < SPECIAL["<|endoftext|>"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_times_are_left_out_written_or_returned(tokenizer: Any) -> None:
    hello, world = (tokenizer.encode(text, add_special_tokens=False) for text in (" hi", " all"))
    start = [SPECIAL["<|startoftranscript|>"]]
    ids = [*start, FIRST_TIME, *hello, FIRST_TIME + 50, FIRST_TIME + 60, *world, FIRST_TIME + 100]
    found = tokenizer.decode(ids, skip_special_tokens=True, output_offsets=True)
    assert found["text"] == " hi all"
    assert [span["text"] for span in found["offsets"]] == [" hi", " all"]
    times = [span["timestamp"] for span in found["offsets"]]
    np.testing.assert_allclose(times, [(0, 1), (1.2, 2)])
    written = tokenizer.decode(ids[1:], decode_with_timestamps=True)
    assert written == "<|0.00|> hi<|1.00|><|1.20|> all<|2.00|>"


def test_a_prompt_is_text_behind_the_token_for_what_came_before(tokenizer: Any) -> None:
    ids = tokenizer.get_prompt_ids("Dashwood").tolist()
    assert ids[0] == SPECIAL["<|startofprev|>"]
    assert tokenizer.decode(ids[1:]) == " Dashwood"
    with pytest.raises(ValueError, match="disallowed special token"):
        tokenizer.get_prompt_ids("<|en|>")


def test_the_generation_config_has_openais_rules(directory: Path) -> None:
    from transformers.models.whisper.configuration_whisper import NON_SPEECH_TOKENS

    config = tf.GenerationConfig.from_pretrained(directory)
    tasks = {*range(50357, 50362)}
    assert {*config.suppress_tokens} == {
        *NON_SPEECH_TOKENS,
        SPECIAL["<|startoftranscript|>"],
    } | tasks
    assert config.begin_suppress_tokens == [220, 50256]
    assert config.decoder_start_token_id == SPECIAL["<|startoftranscript|>"]
    assert config.prev_sot_token_id == SPECIAL["<|startofprev|>"]
    assert config.no_timestamps_token_id == SPECIAL["<|notimestamps|>"]
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (50256,) * 3
    assert (config.max_initial_timestamp_index, config.max_length) == (50, 448)
    assert len(config.alignment_heads) == 8
    assert not config.is_multilingual
    assert not config.return_timestamps
    assert not hasattr(config, "lang_to_id")
    assert getattr(config, "forced_decoder_ids", None) is None


def test_the_pipeline_and_the_model_understand_the_recordings(
    transcriber: Transcriber, recordings: dict[Path, str]
) -> None:
    found = []
    for path in recordings:
        samples = read_samples(path)
        text = transcriber.transcribe(samples)
        assert text == transcriber.read(transcriber.generate(samples)), path.name
        found.append(normalize(text))
    assert get_error_rate(found, list(recordings.values())) <= MAX_ERROR_RATE, found


def test_words_have_times_inside_the_recording(
    transcriber: Transcriber, recordings: dict[Path, str]
) -> None:
    found = []
    for path in recordings:
        samples = read_samples(path)
        words = transcriber.time_words(samples)
        times = [time for word in words for time in (word.start_s, word.end_s)]
        assert times == sorted(times), path.name
        assert 0 <= times[0] <= times[-1] <= len(samples) / RATE
        found.append(normalize("".join(word.text for word in words)))
    assert get_error_rate(found, list(recordings.values())) <= MAX_ERROR_RATE + 0.02, found


def test_a_long_speech_is_the_same_each_time(recordings: dict[Path, str]) -> None:
    speech, again = make_long_speech(recordings), make_long_speech(recordings)
    assert len(speech.samples) == LONG_S * RATE
    np.testing.assert_array_equal(speech.samples, again.samples)
    assert speech.sentences == again.sentences
    pauses = [
        after.start_s - before.end_s
        for before, after in zip(speech.sentences, speech.sentences[1:], strict=False)
    ]
    assert 0.48 < min(pauses) < max(pauses) < 1.52
    assert {sentence.text for sentence in speech.sentences} == {*recordings.values()}


@pytest.mark.parametrize("is_conditioned", [False, True])
def test_segments_of_a_minute_follow_its_sentences(
    transcriber: Transcriber, recordings: dict[Path, str], is_conditioned: bool
) -> None:
    speech = make_long_speech(recordings, duration_s=60)
    found = transcriber.transcribe_long(speech.samples, is_conditioned=is_conditioned)
    starts = [segment.start_s for segment in found.segments]
    assert starts == sorted(starts)
    assert "".join(segment.text for segment in found.segments) == found.text
    assert speech.sentences[-1].start_s - 5 < found.segments[-1].end_s <= LONG_S
    assert get_error_rate([normalize(found.text)], [speech.words]) < 0.25, found.text
