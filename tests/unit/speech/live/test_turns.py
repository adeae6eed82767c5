"""Where turns begin and end, without a network: everything loud is a voice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.speech.live.session import TurnDetection
from sensorium.speech.live.turns import (
    EMPTY_CODE,
    FULL_CODE,
    MAX_BUFFER_S,
    MAX_TURN_S,
    AudioBufferError,
    TurnBuffer,
    TurnEnded,
    TurnEvent,
    TurnStarted,
)
from sensorium.speech.live.voices import FRAME
from tests.support.talking import LOUD, QUIET, RATE, LoudnessDetector, make_tones

FRAME_S = FRAME / RATE


def make_buffer(detection: TurnDetection | None = TurnDetection()) -> TurnBuffer:  # noqa: B008
    return TurnBuffer(detection, make_detector=LoudnessDetector)


def add(buffer: TurnBuffer, audio: np.ndarray, step: int = 1600) -> list[TurnEvent]:
    events = []
    for start in range(0, len(audio), step):
        events += buffer.add(audio[start : start + step])
    return events


def test_a_turn_has_padding_before_it_and_silence_behind_it() -> None:
    audio = make_tones((QUIET, 1.0), (LOUD, 1.0), (QUIET, 1.0))
    started, ended = add(make_buffer(), audio)
    assert isinstance(started, TurnStarted)
    assert isinstance(ended, TurnEnded)
    assert started.start / RATE == pytest.approx(0.7, abs=FRAME_S)
    assert ended.start == started.start
    assert ended.end / RATE == pytest.approx(2.5, abs=2 * FRAME_S)
    assert np.array_equal(ended.samples, audio[ended.start : ended.end])


def test_a_short_pause_does_not_end_a_turn() -> None:
    audio = make_tones((LOUD, 0.5), (QUIET, 0.4), (LOUD, 0.5), (QUIET, 0.6))
    events = add(make_buffer(), audio)
    assert [type(event) for event in events] == [TurnStarted, TurnEnded]
    short = TurnDetection(silence_duration_ms=300)
    assert len(add(make_buffer(short), audio)) == 4


@pytest.mark.parametrize("threshold", [0.02, 0.1, 0.15, 1.0])
def test_any_threshold_lets_a_turn_end(threshold: float) -> None:
    audio = make_tones((QUIET, 1.0), (LOUD, 1.0), (QUIET, 1.0))
    events = add(make_buffer(TurnDetection(threshold=threshold)), audio)
    assert [type(event) for event in events] == [TurnStarted, TurnEnded]


def test_a_turn_ends_at_once_but_not_while_there_is_a_voice() -> None:
    audio = make_tones((QUIET, 1.0), (LOUD, 1.0), (QUIET, 1.0))
    events = add(make_buffer(TurnDetection(silence_duration_ms=0)), audio)
    assert [type(event) for event in events] == [TurnStarted, TurnEnded]


def test_turns_do_not_overlap() -> None:
    long_padding = TurnDetection(prefix_padding_ms=2000, silence_duration_ms=100)
    audio = make_tones((LOUD, 0.5), (QUIET, 0.3), (LOUD, 0.5), (QUIET, 0.3))
    turns = [e for e in add(make_buffer(long_padding), audio) if isinstance(e, TurnEnded)]
    assert turns[0].start == 0
    assert turns[1].start == turns[0].end


def test_speech_without_end_is_cut_at_its_quietest_place() -> None:
    # A quiet place of 0.3 s, which ends no turn, after 25 s of 45.
    audio = make_tones((LOUD, 25.0), (QUIET, 0.3), (LOUD, 19.7), (QUIET, 1.0))
    events = add(make_buffer(), audio)
    assert [type(each) for each in events] == [TurnStarted, TurnEnded, TurnStarted, TurnEnded]
    first, again, last = events[1:]
    assert isinstance(first, TurnEnded)
    assert isinstance(last, TurnEnded)
    assert 25.0 <= first.end / RATE <= 25.3 + FRAME_S
    assert again == TurnStarted(first.end)
    joined = np.concatenate([first.samples, last.samples])
    assert np.array_equal(joined, audio[: last.end])  # nothing is lost between the two


def test_a_commit_ends_the_turn_that_is_spoken() -> None:
    buffer = make_buffer()
    add(buffer, make_tones((QUIET, 1.0), (LOUD, 0.5)))
    turn = buffer.commit()
    assert turn.end == buffer.end == 1.5 * RATE
    with pytest.raises(AudioBufferError) as caught:
        buffer.commit()
    assert caught.value.code == EMPTY_CODE
    assert buffer.num_samples == 0


def test_without_speech_there_is_nothing_to_commit() -> None:
    buffer = make_buffer()
    add(buffer, make_tones((QUIET, 5.0)))
    with pytest.raises(AudioBufferError, match="no speech"):
        buffer.commit()


def test_without_detection_the_caller_ends_turns() -> None:
    buffer = make_buffer(None)
    audio = make_tones((QUIET, 0.5), (LOUD, 0.5))
    assert add(buffer, audio) == []
    assert np.array_equal(buffer.commit().samples, audio)
    add(buffer, audio[:800])
    with pytest.raises(AudioBufferError, match="50 ms"):
        buffer.commit()
    add(buffer, audio[:800])
    assert buffer.commit().start == len(audio)  # time continues


def test_a_full_buffer_takes_no_more_and_keeps_what_it_has() -> None:
    buffer = make_buffer(None)
    minute = np.zeros(60 * RATE, np.float32)
    for _ in range(int(MAX_BUFFER_S) // 60):
        buffer.add(minute)
    with pytest.raises(AudioBufferError) as caught:
        buffer.add(minute[:1])
    assert caught.value.code == FULL_CODE
    assert buffer.commit().end == MAX_BUFFER_S * RATE
    buffer.add(minute)


def test_an_hour_of_silence_holds_no_memory() -> None:
    buffer = make_buffer()
    chunk = np.zeros(10 * RATE, np.float32)
    for _ in range(360):
        assert buffer.add(chunk) == []
        assert buffer.num_samples <= 0.3 * RATE + 2 * FRAME
    assert buffer.end == 3600 * RATE


@given(
    parts=st.lists(
        st.tuples(st.sampled_from([QUIET, LOUD]), st.floats(0.05, 3.0)), min_size=1, max_size=12
    ),
    step=st.integers(100, 20_000),
)
def test_turns_are_pieces_of_the_audio_in_order(
    parts: list[tuple[float, float]], step: int
) -> None:
    audio = make_tones(*parts)
    buffer = make_buffer()
    events = add(buffer, audio, step)
    kinds = [type(event) for event in events]
    assert kinds == [TurnStarted, TurnEnded] * (len(kinds) // 2) + [TurnStarted] * (len(kinds) % 2)
    end = 0
    for event in events:
        assert event.start >= end
        if isinstance(event, TurnEnded):
            assert np.array_equal(event.samples, audio[event.start : event.end])
            assert event.end - event.start <= MAX_TURN_S * RATE
            end = event.end
    assert events == [] or buffer.end == len(audio)
    is_open = len(kinds) % 2 == 1
    assert is_open or buffer.num_samples <= 0.3 * RATE + 2 * FRAME + step
    # The same audio in chunks of another size has the same turns.
    again = add(make_buffer(), audio, 512)
    assert [(type(e), e.start) for e in again] == [(type(e), e.start) for e in events]
