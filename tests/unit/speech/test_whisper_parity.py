"""Our rules for Whisper give the tokens and segments of Transformers' `generate`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median
from typing import Any

import pytest
import torch

from sensorium.speech import whisper
from sensorium.speech.alignment import find_token_times
from sensorium.speech.options import SpeechOptions
from sensorium.speech.timestamps import Piece, cut_at_timestamps
from sensorium.speech.transcript import Transcript
from sensorium.speech.whisper import FRAMES_PER_S, compress_tokens, transcribe_whisper
from sensorium.speech.whisper_tokens import WhisperSettings, WhisperTokens
from sensorium.speech.windows import WindowResult
from sensorium.speech.words import split_words
from sensorium.types.sampling import TokenBans
from tests.unit.speech.tiny_whisper import (
    BANS,
    IDS,
    NUM_WINDOW_FRAMES,
    TEXTS,
    VOCAB_SIZE,
    ModelAnswer,
    TinyTokenizer,
    make_features,
    make_model,
    read_tokens,
    run_rules,
)

LONG = 950  # frames: more than three windows
SHORT = 300  # Transformers finds the language of a whole window only
PLAIN = WhisperSettings(
    temperatures=(0.0,),
    max_compression_ratio=None,
    min_avg_logprob=None,
    max_no_speech_prob=None,
    condition_on_prev_tokens=False,
)
CARRIED = replace(PLAIN, condition_on_prev_tokens=True)
PROMPT = " ba du, ki mo"
SEGMENTS = SpeechOptions(language="de", needs_segments=True)
WORDS = replace(SEGMENTS, needs_words=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    seed: int
    num_frames: int = LONG
    options: SpeechOptions = field(default=SEGMENTS)
    settings: WhisperSettings = PLAIN
    is_multilingual: bool = True


def mark_slow(*values: Any) -> list[Any]:
    """Return parameters of a test that only `make test-slow` uses."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def _name(options: SpeechOptions) -> str:
    times = "times" if options.needs_segments else "no times"
    return f"{options.task} {options.language} {options.prompt} {times}"


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Stop warnings, which Transformers writes about itself, and threads, which only wait here."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(num_threads)


@cache
def get_model(seed: int, is_multilingual: bool) -> Any:
    return make_model(seed, is_multilingual=is_multilingual)


def generate(case: Case, **arguments: Any) -> list[dict[str, Any]]:
    """Return the segments of Transformers that have a text."""
    model = get_model(case.seed, case.is_multilingual)
    options, settings = case.options, case.settings
    if case.is_multilingual:
        arguments |= {"language": options.language, "task": options.task}
    if settings.max_new_tokens:
        arguments["max_new_tokens"] = settings.max_new_tokens
    if settings.max_length:
        arguments["max_length"] = settings.max_length
    if options.prompt:
        prompt = [IDS["<|startofprev|>"], *TinyTokenizer().encode(options.prompt)]
        arguments["prompt_ids"] = torch.tensor(prompt)
    output = model.generate(
        make_features(case.num_frames, case.seed),
        return_timestamps=case.num_frames > SHORT or options.needs_segments or options.needs_words,
        return_segments=True,
        temperature=settings.temperatures,
        compression_ratio_threshold=settings.max_compression_ratio,
        logprob_threshold=settings.min_avg_logprob,
        no_speech_threshold=settings.max_no_speech_prob,
        condition_on_prev_tokens=settings.condition_on_prev_tokens,
        **arguments,
    )
    tokens = read_tokens(model)
    decode = TinyTokenizer().decode
    return [
        {**segment, "tokens": segment["tokens"].tolist()}
        for segment in output["segments"][0]
        if decode([each for each in segment["tokens"].tolist() if tokens.is_text(each)]).strip()
    ]


generate_once = cache(generate)


def transcribe(case: Case, tokens: WhisperTokens | None = None) -> tuple[Transcript, ModelAnswer]:
    model = get_model(case.seed, case.is_multilingual)
    answer = ModelAnswer(model, make_features(case.num_frames, case.seed))
    rules = transcribe_whisper(
        tokens or read_tokens(model),
        TinyTokenizer(),
        num_frames=case.num_frames,
        duration_s=case.num_frames / FRAMES_PER_S,
        options=case.options,
        settings=case.settings,
    )
    return run_rules(rules, answer), answer


def check(case: Case, tokens: WhisperTokens | None = None) -> ModelAnswer:
    expected = generate_once(case)
    transcript, answer = transcribe(case, tokens)
    assert [list(each.token_ids) for each in transcript.segments] == [
        each["tokens"] for each in expected
    ]
    for ours, theirs in zip(transcript.segments, expected, strict=True):
        most = transcript.duration_s
        assert ours.start == pytest.approx(min(max(0.0, float(theirs["start"])), most))
        assert ours.end == pytest.approx(min(float(theirs["end"]), most))
    return answer


@pytest.mark.parametrize("settings", [PLAIN, CARRIED], ids=["plain", "carried"])
@pytest.mark.parametrize("seed", [0, *mark_slow(1, 2, 3)])
def test_long_audio_has_the_same_segments(seed: int, settings: WhisperSettings) -> None:
    answer = check(Case(seed=seed, settings=settings))
    assert len(answer.requests) > 3


@pytest.mark.parametrize("settings", [PLAIN, CARRIED], ids=["plain", "carried"])
def test_a_caller_decides_whether_text_is_carried(settings: WhisperSettings) -> None:
    expected = {
        carries: transcribe(
            Case(seed=0, settings=replace(settings, condition_on_prev_tokens=carries))
        )[0].segments
        for carries in (True, False)
    }
    assert expected[True] != expected[False]
    for carries, segments in expected.items():
        options = replace(SEGMENTS, carries_text=carries)
        assert transcribe(Case(seed=0, settings=settings, options=options))[0].segments == segments


def test_long_audio_of_an_unknown_language_is_translated_alike() -> None:
    options = SpeechOptions(task="translate", prompt=PROMPT)
    check(Case(seed=7, options=options, settings=CARRIED))


@pytest.mark.parametrize("prompt", ["", PROMPT], ids=["alone", "prompted"])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_new_tokens": 6},
        {"max_length": 6},
        {"max_length": 30},
        {"max_length": 9, "max_new_tokens": 6},
    ],
    ids=str,
)
def test_texts_of_limited_length_are_the_same(limits: dict[str, int], prompt: str) -> None:
    settings = replace(CARRIED, **limits)
    options = replace(SEGMENTS, prompt=prompt)
    answer = check(Case(seed=2, options=options, settings=settings))
    lengths = [len(result.token_ids) for result in answer.results]
    assert lengths[0] <= min(limits.values())
    if limits == {"max_length": 6}:  # the limit grows by each window's prompt
        assert max(lengths) > 6


@pytest.mark.parametrize("seed", [4, *mark_slow(5)])
@pytest.mark.parametrize("settings", [PLAIN, CARRIED], ids=["plain", "carried"])
def test_prompts_have_the_same_effect(seed: int, settings: WhisperSettings) -> None:
    options = replace(SEGMENTS, prompt=PROMPT)
    check(Case(seed=seed, options=options, settings=settings))
    with_prompt = generate_once(Case(seed=seed, options=options, settings=settings))
    without = generate_once(Case(seed=seed, settings=settings))
    assert with_prompt != without, "the model does not look at the prompt"


@pytest.mark.parametrize(
    "options",
    [
        SpeechOptions(language="en"),
        SpeechOptions(language="German", needs_segments=True),
        SpeechOptions(needs_segments=True),
        SpeechOptions(),
        SpeechOptions(task="translate", language="ja"),
        SpeechOptions(task="translate", needs_segments=True),
        SpeechOptions(language="en", prompt=PROMPT),
    ],
    ids=_name,
)
@pytest.mark.parametrize("seed", [6, *mark_slow(0)])
def test_short_audio_has_the_same_segments(seed: int, options: SpeechOptions) -> None:
    check(Case(seed=seed, num_frames=SHORT, options=options))


@pytest.mark.parametrize("num_frames", [271, 40, 1])
@pytest.mark.parametrize("options", [SEGMENTS, SpeechOptions(language="en")], ids=_name)
def test_audio_that_fills_no_window_has_the_same_segments(
    options: SpeechOptions, num_frames: int
) -> None:
    check(Case(seed=6, num_frames=num_frames, options=options))


def test_detected_languages_are_the_same_and_differ_between_recordings() -> None:
    found = set()
    for seed in range(6):
        case = Case(seed=seed, num_frames=SHORT, options=SpeechOptions())
        model = get_model(seed, True)
        features = make_features(SHORT, seed)
        detected = model.detect_language(features, num_segment_frames=SHORT).item()
        language = transcribe(case)[0].language
        assert IDS[f"<|{language}|>"] == detected
        found.add(language)
    assert len(found) > 1


@pytest.mark.parametrize(
    "options", [SpeechOptions(), SpeechOptions(needs_segments=True)], ids=_name
)
@pytest.mark.parametrize("num_frames", [SHORT, *mark_slow(LONG)])
def test_english_only_models_give_the_same(options: SpeechOptions, num_frames: int) -> None:
    case = Case(seed=1, num_frames=num_frames, options=options, is_multilingual=False)
    assert transcribe(case)[0].language == "en"
    check(case)


@pytest.mark.parametrize("seed", [1, *mark_slow(2)])
def test_silent_windows_are_dropped_alike(seed: int) -> None:
    result = transcribe(Case(seed=seed, settings=CARRIED))[1].results[0]
    assert result.scored_probability is not None
    settings = replace(
        CARRIED,
        min_avg_logprob=average(result) + 0.001,
        max_no_speech_prob=0.99 * result.scored_probability,
    )
    check(Case(seed=seed, settings=settings))
    segments = transcribe(Case(seed=seed, settings=settings))[0].segments
    assert segments == () or segments[0].seek >= NUM_WINDOW_FRAMES


@pytest.mark.parametrize("measure", ["repetition", *mark_slow("likelihood")])
@pytest.mark.parametrize("seed", [0, *mark_slow(3)])
def test_greedy_attempts_that_are_not_good_enough_are_repeated_alike(
    seed: int, measure: str
) -> None:
    results = transcribe(Case(seed=seed, settings=CARRIED))[1].results
    if measure == "likelihood":
        settings = replace(CARRIED, min_avg_logprob=median(map(average, results)) + 1e-4)
    else:
        ratios = [compress_tokens(result.token_ids, VOCAB_SIZE) for result in results]
        settings = replace(CARRIED, max_compression_ratio=median(ratios) - 1e-4)
    case = Case(seed=seed, settings=replace(settings, temperatures=(0.0, 0.0)))
    num_attempts = count_attempts(case)
    answer = check(case)
    seeks = [request.first_frame for request in answer.requests]
    assert len(seeks) == num_attempts
    assert len(set(seeks)) < len(seeks) < 2 * len(set(seeks))


def average(result: WindowResult) -> float:
    return sum(result.logprobs) / len(result.logprobs)


def count_attempts(case: Case) -> int:
    """Return how often Transformers decodes windows of a case."""
    model = get_model(case.seed, case.is_multilingual)
    need_fallback = model._need_fallback
    attempts = []

    def count(*arguments: Any) -> Any:
        attempts.append(arguments)
        return need_fallback(*arguments)

    model._need_fallback = count
    try:
        generate(case)
    finally:
        del model._need_fallback
    return len(attempts)


@pytest.mark.parametrize("num_frames", [271, LONG, *mark_slow(SHORT)])
@pytest.mark.parametrize("seed", [0, *mark_slow(1, 4)])
def test_times_of_words_are_those_of_tokens(seed: int, num_frames: int) -> None:
    check_words(Case(seed=seed, num_frames=num_frames, options=WORDS))


def test_times_of_words_in_padding_would_be_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_wrong_times(attention: Any, **arguments: Any) -> Any:
        return find_token_times(attention, **{**arguments, "num_positions": NUM_WINDOW_FRAMES})

    monkeypatch.setattr(whisper, "find_token_times", find_wrong_times)
    with pytest.raises(AssertionError):
        check_words(Case(seed=0, num_frames=200, options=WORDS))


def check_words(case: Case) -> None:
    num_frames = case.num_frames
    expected = generate(
        case,
        return_token_timestamps=True,
        attention_mask=torch.ones(1, num_frames, dtype=torch.long),
    )
    segments = transcribe(case)[0].segments
    assert [list(each.token_ids) for each in segments] == [each["tokens"] for each in expected]
    ends = [word.end for segment in segments for word in segment.words]
    assert ends == sorted(ends)
    last = 0.0
    for ours, theirs in zip(segments, expected, strict=True):
        times = theirs["token_timestamps"].tolist()
        text = [i for i, each in enumerate(theirs["tokens"]) if each < len(TEXTS)]
        spans = split_words([theirs["tokens"][i] for i in text], TinyTokenizer().decode, "de")
        spans = [span for span in spans if span.text.strip()]
        assert len(ours.words) == len(spans)
        for word, span in zip(ours.words, spans, strict=True):
            first = max(last, times[text[span.start] - 1])
            assert word.start == pytest.approx(first, abs=0.041)
            # Random attention may put a word behind the beginning of the next window.
            last = max(last, times[text[span.stop - 1]])
            assert word.end == pytest.approx(last, abs=0.041)
    assert ends


def _seek_past_window(*_: Any, **options: Any) -> tuple[list[Piece], int]:
    pieces, _ = cut_at_timestamps(*_, **options)
    return pieces, options["num_frames"]


def _seek_to_second_timestamp(token_ids: Any, **options: Any) -> tuple[list[Piece], int]:
    pieces, num_frames = cut_at_timestamps(token_ids, **options)
    if num_frames < options["num_frames"]:
        num_frames = 2 * (token_ids[pieces[-1].stop - 1] - options["first_timestamp_id"])
    return pieces, num_frames


@pytest.mark.parametrize("wrong", [_seek_past_window, *mark_slow(_seek_to_second_timestamp)])
def test_a_wrong_rule_for_the_next_window_would_be_detected(
    wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whisper, "cut_at_timestamps", wrong)
    assert is_difference_seen(Case(seed=0))


@pytest.mark.parametrize(
    "changes",
    [
        {"bans": TokenBans(first_token_ids=BANS.first_token_ids)},
        {"max_initial_index": None},
        pytest.param({"max_positions": 39}, marks=pytest.mark.slow),
        {"no_timestamps_id": IDS["<|notimestamps|>"] + 1},
    ],
    ids=str,
)
def test_a_wrong_rule_for_tokens_would_be_detected(changes: dict[str, Any]) -> None:
    assert is_difference_seen(Case(seed=0), changes)


def test_a_wrong_rule_for_the_first_token_would_be_detected() -> None:
    case = Case(seed=0, num_frames=SHORT, options=SpeechOptions(language="en"))
    assert is_difference_seen(case, {"bans": TokenBans(sequences=BANS.sequences)})


def test_a_wrong_rule_for_carried_text_would_be_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def remember_all(self: Any, token_ids: tuple[int, ...]) -> None:
        self._previous = (*self._previous, *token_ids)[-self._max_previous :]

    monkeypatch.setattr(whisper._WhisperRules, "_remember", remember_all)
    assert is_difference_seen(Case(seed=0, settings=CARRIED))


def is_difference_seen(case: Case, changes: dict[str, Any] | None = None) -> bool:
    """Return True if the check of a case fails for one of a few models."""
    for seed in range(4):
        tokens = replace(read_tokens(get_model(seed, True)), **(changes or {}))
        try:
            check(replace(case, seed=seed), tokens)
        except (AssertionError, IndexError):
            return True
    return False
