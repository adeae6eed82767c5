"""Whisper's rules with answers from a script, where a model would be too predictable."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, Transcript
from sensorium.speech.whisper import list_temperatures, transcribe_whisper
from sensorium.speech.whisper_tokens import WhisperSettings, WhisperTokens
from sensorium.speech.windows import WindowRequest, WindowResult
from sensorium.types.errors import InvariantError, RequestError
from sensorium.types.sampling import NO_BANS
from tests.unit.speech.tiny_whisper import (
    END_ID,
    IDS,
    NUM_POSITIONS,
    TEXTS,
    VOCAB_SIZE,
    Answer,
    TinyTokenizer,
    run_rules,
)

START, PREVIOUS = IDS["<|startoftranscript|>"], IDS["<|startofprev|>"]
ZERO = IDS["<|notimestamps|>"] + 1
TOKENS = WhisperTokens(
    vocab_size=VOCAB_SIZE,
    start_id=START,
    end_id=END_ID,
    previous_id=PREVIOUS,
    no_timestamps_id=ZERO - 1,
    language_ids={"en": IDS["<|en|>"], "ja": IDS["<|ja|>"]},
    task_ids={"transcribe": IDS["<|transcribe|>"], "translate": IDS["<|translate|>"]},
    is_multilingual=True,
    special_ids=frozenset(IDS.values()),
    bans=NO_BANS,
    max_initial_index=None,
    alignment_heads=((0, 0), (0, 1)),
    max_positions=40,
    num_window_frames=2 * NUM_POSITIONS,
    median_filter_width=7,
)
ENGLISH = SpeechOptions(language="en", needs_segments=True)
WINDOW = 2 * NUM_POSITIONS


def encode(text: str) -> tuple[int, ...]:
    return tuple(TinyTokenizer().encode(text))


def say(
    *parts: str | int, logprob: float = -0.1, no_speech: float = 0.0, end: bool = True
) -> WindowResult:
    """Return an answer of texts and timestamps, which are given in positions."""
    ids = [encode(part) if isinstance(part, str) else (ZERO + part,) for part in parts]
    token_ids = (*itertools.chain(*ids), *([END_ID] if end else []))
    return WindowResult(
        token_ids=token_ids, logprobs=(logprob,) * len(token_ids), scored_probability=no_speech
    )


@dataclass(slots=True)
class Script:
    """Gives answers in order, and keeps what it was asked."""

    answers: Iterable[WindowResult]
    requests: list[WindowRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answers = iter(self.answers)

    def __call__(self, request: WindowRequest) -> WindowResult:
        self.requests.append(request)
        return next(self.answers)  # type: ignore[call-overload]


def transcribe(
    answer: Answer,
    num_frames: int = WINDOW,
    options: SpeechOptions = ENGLISH,
    settings: WhisperSettings | None = None,
    tokens: WhisperTokens = TOKENS,
    duration_s: float | None = None,
) -> Transcript:
    rules = transcribe_whisper(
        tokens,
        TinyTokenizer(),
        num_frames=num_frames,
        duration_s=num_frames / 100 if duration_s is None else duration_s,
        options=options,
        settings=settings,
    )
    return run_rules(rules, answer)


def test_a_bad_window_is_decoded_again_at_the_next_temperature() -> None:
    bad = say(0, " ba", 100, logprob=-1.5)
    script = Script([bad, bad, say(0, " du", 140)])
    transcript = transcribe(script)
    assert [request.temperature for request in script.requests] == [0.0, 0.2, 0.4]
    assert len({request.prompt_token_ids for request in script.requests}) == 1
    assert transcript.text == "du"
    assert transcript.segments[0].temperature == 0.4
    assert transcript.usage.num_output_tokens == 12  # with those of the attempts that were refused


def test_repeated_tokens_are_decoded_again() -> None:
    script = Script([say(0, " ba" * 30, 100), say(0, " ba du ki", 140)])
    assert transcribe(script).text == "ba du ki"
    assert len(script.requests) == 2


def test_the_last_temperature_is_accepted_whatever_it_gives() -> None:
    script = Script([say(0, " ba", 100, logprob=-3.0)] * 6)
    transcript = transcribe(script)
    assert len(script.requests) == 6
    assert transcript.segments[0].temperature == 1.0
    assert transcript.segments[0].avg_logprob == pytest.approx(-3.0)


def test_thresholds_can_be_turned_off() -> None:
    off = WhisperSettings(max_compression_ratio=None, min_avg_logprob=None, max_no_speech_prob=None)
    script = Script([say(0, " ba" * 30, 100, logprob=-9.0, no_speech=0.99)])
    assert transcribe(script, settings=off).segments[0].temperature == 0.0


def test_silence_is_dropped_only_if_its_text_is_also_unlikely() -> None:
    silent = say(0, " ba", 100, logprob=-1.1, no_speech=0.7)
    likely = say(0, " du", 100, logprob=-0.9, no_speech=0.7)
    script = Script([silent, likely])
    transcript = transcribe(script, num_frames=2 * WINDOW)
    assert [request.first_frame for request in script.requests] == [0, WINDOW]
    assert [(segment.text, segment.seek) for segment in transcript.segments] == [(" du", WINDOW)]
    assert transcript.segments[0].no_speech_prob == 0.7


def test_without_a_threshold_for_the_text_silence_suffices() -> None:
    script = Script([say(0, " ba", 100, no_speech=0.7)])
    assert transcribe(script, settings=WhisperSettings(min_avg_logprob=None)).text == ""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (0.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (0.4, (0.4, 0.6, 0.8, 1.0)),
        (0.5, (0.5, 0.6, 0.8, 1.0)),
        (1.0, (1.0,)),
        (1.5, (1.5,)),
    ],
)
def test_fallback_temperatures_start_at_the_callers(
    given: float | None, expected: tuple[float, ...]
) -> None:
    assert list_temperatures(WhisperSettings().temperatures, given) == expected
    script = Script([say(0, " ba", 100, logprob=-3.0)] * len(expected))
    transcribe(script, options=replace(ENGLISH, temperature=given))
    assert tuple(request.temperature for request in script.requests) == expected


def test_a_window_gets_carried_text_unless_it_was_sampled_hot() -> None:
    first, second = say(0, " ba", 50, 50, " du", 150, 150), say(0, " ki", 150)
    hot = [say(0, " mo", 150, logprob=-2.0)] * 3 + [say(0, " mo", 150)]
    script = Script([first, second, *hot, say(0, " ba", 150), say(0, " du", 150)])
    options = replace(ENGLISH, prompt="zé", carries_text=True)
    transcribe(script, num_frames=5 * WINDOW, options=options)
    prompts = [request.prompt_token_ids for request in script.requests]
    begin = (START, IDS["<|en|>"], IDS["<|transcribe|>"])
    given = encode(" zé")
    # Of the pair at the end of the first window, one timestamp is kept.
    said = (*given, ZERO, *encode(" ba"), ZERO + 50, ZERO + 50, *encode(" du"), ZERO + 150)
    assert prompts[0] == (PREVIOUS, *given, *begin)
    assert prompts[1] == (PREVIOUS, *said, *begin)
    said = (*said, ZERO, *encode(" ki"), ZERO + 150)
    assert prompts[2:6] == [(PREVIOUS, *said, *begin)] * 4
    assert script.requests[5].temperature == pytest.approx(0.6)
    assert prompts[6] == (PREVIOUS, *given, *begin)
    said = (*said, ZERO, *encode(" mo"), ZERO + 150, ZERO, *encode(" ba"), ZERO + 150)
    assert prompts[7] == (PREVIOUS, *said[-19:], *begin)


def test_long_prompts_are_cut_at_their_start() -> None:
    script = Script([say(0, " ba", 150)])
    transcript = transcribe(script, options=replace(ENGLISH, prompt="ba" + " du" * 30))
    prompt = script.requests[0].prompt_token_ids
    assert prompt[:20] == (PREVIOUS, *encode(" du") * 19)
    assert script.requests[0].max_tokens == 40 - len(prompt)
    assert transcript.usage.num_text_tokens == 19


def test_a_prompt_with_special_tokens_is_refused_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        transcribe(Script([]), options=replace(ENGLISH, prompt="ba<|endoftext|>"))
    assert caught.value.path == ("prompt",)


def test_an_unknown_language_is_refused_at_once() -> None:
    with pytest.raises(RequestError, match="en, ja"):
        transcribe(Script([]), options=SpeechOptions(language="fr"))


def test_a_language_that_is_not_given_is_asked_for() -> None:
    found = WindowResult(token_ids=(IDS["<|ja|>"],), logprobs=(-0.1,))
    script = Script([found, say("日本")])
    transcript = transcribe(script, options=SpeechOptions(task="translate"))
    assert transcript.language == "ja"
    question, window = script.requests
    assert question.prompt_token_ids == (START,)
    assert (question.max_tokens, set(question.allowed or ())) == (1, {IDS["<|en|>"], IDS["<|ja|>"]})
    assert window.prompt_token_ids == (START, IDS["<|ja|>"], IDS["<|translate|>"], ZERO - 1)
    assert window.scored_token == (0, IDS["<|nospeech|>"])
    assert window.timestamps is None
    assert transcript.usage.num_audio_tokens == NUM_POSITIONS


@pytest.mark.parametrize("num_frames", [WINDOW, WINDOW + 1])
def test_only_audio_of_one_window_may_have_no_timestamps(num_frames: int) -> None:
    script = Script([say(0, " ba", 150)] * 2)
    transcribe(script, num_frames=num_frames, options=SpeechOptions(language="en"))
    assert (script.requests[0].timestamps is not None) == (num_frames > WINDOW)


def test_times_end_with_the_audio_and_texts_are_joined() -> None:
    script = Script([say(0, " ba", 60, 70, " du", 150, 150), say(0, " ki.", 90)])
    transcript = transcribe(script, num_frames=WINDOW + 33, duration_s=3.325)
    times = [(segment.start, segment.end) for segment in transcript.segments]
    assert times == [(0.0, 1.2), (1.4, 3.0), (3.0, 3.325)]
    assert transcript.text == "ba du ki."
    assert [segment.index for segment in transcript.segments] == [0, 1, 2]
    assert transcript.usage.num_audio_tokens == NUM_POSITIONS + 17


def test_pieces_without_text_are_no_segments() -> None:
    script = Script([say(0, " ", 60, 70, " du", 150)])
    assert [segment.text for segment in transcribe(script).segments] == [" du"]


def test_audio_without_frames_has_no_text() -> None:
    transcript = transcribe(Script([]), num_frames=0, options=SpeechOptions())
    assert (transcript.text, transcript.language, transcript.segments) == ("", None, ())


def test_scores_are_those_of_text_tokens() -> None:
    answer = replace(say(0, " ba日", 150), logprobs=(-0.1, -0.2, -0.3, -0.4, -0.5))
    options = replace(ENGLISH, needs_logprobs=True)
    (segment,) = transcribe(Script([answer]), options=options).segments
    scores = [(score.text, score.utf8, score.logprob) for score in segment.scores]
    assert scores == [(" ba", b" ba", -0.2), ("日", "日".encode(), -0.3)]
    assert segment.avg_logprob == pytest.approx(-0.3)


def align(request: WindowRequest) -> WindowResult:
    """Answer an alignment in which each token has the same share of the window."""
    num_tokens = len(request.prompt_token_ids)
    attention = np.full((2, num_tokens, NUM_POSITIONS), 0.01, np.float32)
    # Rows before the last start of a text are dropped; here 3 tokens come before the text.
    share = NUM_POSITIONS // (num_tokens - 3)
    for row in range(3, num_tokens):
        attention[:, row, (row - 3) * share : (row - 2) * share] = 1
    return WindowResult(alignment=attention)


def test_words_have_times_before_their_segments_are_yielded() -> None:
    script = Script([say(0, " ba", "du,", " ki", 140)])
    asked = []

    def answer(request: WindowRequest) -> WindowResult:
        if not request.needs_alignment:
            return script(request)
        asked.append(request)
        return align(request)

    options = replace(ENGLISH, needs_words=True)
    (segment,) = transcribe(answer, options=options).segments
    (request,) = asked
    assert request.prompt_token_ids[3:] == (*segment.token_ids,)
    assert request.max_tokens == 1
    assert [word.text for word in segment.words] == ["badu,", "ki"]
    # Six tokens share 3 s: a token begins where the one before it was read.
    expected = [(0.0, 1.5), (1.5, 2.0)]
    for word, (start, end) in zip(segment.words, expected, strict=True):
        assert (word.start, word.end) == (
            pytest.approx(start, abs=0.1),
            pytest.approx(end, abs=0.1),
        )


def test_a_text_without_an_end_leaves_room_for_its_alignment() -> None:
    text = [0, *[" ba"] * 36]
    asked = []

    def answer(request: WindowRequest) -> WindowResult:
        asked.append(request)
        return align(request) if request.needs_alignment else say(*text, end=False)

    options = replace(ENGLISH, needs_words=True, temperature=1.0)
    (segment,) = transcribe(answer, options=options).segments
    assert len(asked[0].prompt_token_ids) + len(segment.token_ids) == TOKENS.max_positions
    assert len(asked[1].prompt_token_ids) + asked[1].max_tokens <= TOKENS.max_positions
    assert len(segment.words) == 36


def test_an_answer_without_probabilities_is_an_invariant_error() -> None:
    with pytest.raises(InvariantError):
        transcribe(Script([replace(say(0, " ba", 9), logprobs=())]))
    with pytest.raises(InvariantError):
        transcribe(Script([replace(say(0, " ba", 9), scored_probability=None)]))


@dataclass(slots=True)
class Chaos:
    """Answers with any tokens, likelihoods and attention, and counts its windows."""

    random: Any
    num_windows: int = 0

    def __call__(self, request: WindowRequest) -> WindowResult:
        assert request.num_frames > 0
        assert len(request.prompt_token_ids) + request.max_tokens <= TOKENS.max_positions
        if request.needs_alignment:
            shape = (2, len(request.prompt_token_ids), NUM_POSITIONS)
            return WindowResult(alignment=self.random.random(shape, np.float32))
        self.num_windows += 1
        length = self.random.integers(0, request.max_tokens + 1)
        kinds = self.random.integers(0, 5, length)
        token_ids = np.where(
            kinds < 2,
            self.random.integers(0, len(TEXTS), length),
            ZERO
            + self.random.integers(0, NUM_POSITIONS + 1, length) // self.random.integers(1, 60),
        )
        token_ids = np.where(kinds == 4, self.random.integers(0, VOCAB_SIZE, length), token_ids)
        answer = [int(each) for each in token_ids if each != END_ID][: request.max_tokens - 1]
        answer += [END_ID] if self.random.random() < 0.5 else []
        return WindowResult(
            token_ids=tuple(answer),
            logprobs=tuple(-2 * self.random.random(len(answer))),
            scored_probability=self.random.random(),
        )


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(0, 5 * WINDOW), st.booleans(), st.floats(-0.02, 0.02))
def test_any_answers_give_ordered_times_and_an_end(
    seed: int, num_frames: int, needs_words: bool, difference: float
) -> None:
    answer = Chaos(np.random.default_rng(seed))
    duration = max(0.0, num_frames / 100 + difference)
    options = replace(ENGLISH, needs_words=needs_words)
    transcript = transcribe(answer, num_frames, options, duration_s=duration)
    check_times(transcript.segments, duration)
    # Each window is 2 frames further at least, and is tried at six temperatures at most.
    assert answer.num_windows <= 6 * (num_frames // 2 + 1)


def check_times(segments: tuple[Segment, ...], duration: float) -> None:
    times = [time for segment in segments for time in (segment.start, segment.end)]
    words = [word for segment in segments for word in segment.words]
    word_times = [time for word in words for time in (word.start, word.end)]
    for each in (times, word_times):
        assert each == sorted(each)
        assert all(0 <= time <= duration for time in each)
    seeks = [segment.seek for segment in segments]
    assert seeks == sorted(seeks)


# ---- how much work a recording may be

# The sizes of OpenAI's models.
LARGE = replace(TOKENS, vocab_size=51_865, max_positions=448, num_window_frames=3000)


@dataclass(slots=True)
class Rambling:
    """Writes a text into each window that is too unlikely, with a pair of times near its start."""

    position: int  # of the pair
    most: int = 448  # tokens
    requests: list[WindowRequest] = field(default_factory=list)

    def __call__(self, request: WindowRequest) -> WindowResult:
        self.requests.append(request)
        num_words = min(self.most, request.max_tokens) - 3
        return say(0, " ba" * num_words, *[self.position] * 2, logprob=-3.0, end=False)


@pytest.mark.parametrize("most", [448, 4])
@pytest.mark.parametrize("temperature", [None, 0.4, 2.0])
@pytest.mark.parametrize("seconds", [0.2, 1.5, 40.0])
def test_all_attempts_are_bounded_by_the_length_of_the_audio(
    seconds: float, temperature: float | None, most: int
) -> None:
    num_frames = round(100 * seconds)
    answer = Rambling(position=1, most=most)
    options = replace(ENGLISH, temperature=temperature)
    transcript = transcribe(answer, num_frames, options, tokens=LARGE)
    num_tokens = sum(min(most, request.max_tokens) for request in answer.requests)
    assert transcript.usage.num_output_tokens == num_tokens
    num_windows = len({request.first_frame for request in answer.requests})
    # An attempt may begin within the limit and end after it, and the rest is decoded once more.
    assert num_tokens + 64 * num_windows <= 6 * (64 + 50 * seconds) + 3 * 448 + 2 * 64
    for request in answer.requests:
        if request.temperature > 0:
            assert request.max_tokens <= 64 + 50 * request.num_frames / 100
    ends = [request.first_frame + request.num_frames for request in answer.requests]
    assert ends[-1] == num_frames


def test_fast_speech_gets_all_attempts() -> None:
    """Ten minutes have 40 tokens a second, and each text is too unlikely six times."""
    answer = Rambling(position=555)  # 444 tokens in 11.1 s
    transcribe(answer, 60_000, tokens=LARGE)
    seeks = [request.first_frame for request in answer.requests]
    assert sorted(set(seeks)) == list(range(0, 60_000, 1110))
    assert all(seeks.count(seek) == 6 for seek in seeks)


def test_the_likeliest_text_has_all_the_room_as_in_transformers() -> None:
    script = Script([say(0, " ba", 10)])
    transcribe(script, 30, tokens=LARGE)
    assert script.requests[0].max_tokens == 448 - 3
