"""Outputs of CTC/transducer models become tokens, words, segments and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.speech.frames import (
    FrameRules,
    Piece,
    TimedToken,
    collapse,
    find_words,
    read_table,
    transcribe_frames,
)
from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, Transcript
from sensorium.speech.windows import WindowRequest, WindowResult

BLANK = 0
LETTERS = "_ abcdefgh.,'"  # the blank, a space, letters and marks
RATE, PER_FRAME = 1000, 100  # a frame is a tenth of a second


def decode(token_ids: Sequence[int]) -> str:
    """Decode as wav2vec2's tokenizer does: without spaces at the ends."""
    assert BLANK not in token_ids
    return "".join(LETTERS[token_id] for token_id in token_ids).strip()


RULES = FrameRules(
    head="ctc", blank_id=BLANK, rate=RATE, samples_per_frame=PER_FRAME, decode=decode
)


def make_table(frames: str, logprob: float = -1.0) -> Any:
    return np.array([[LETTERS.index(c), logprob] for c in frames], dtype=np.float32).reshape(-1, 2)


def transcribe(*frames: str, **options: Any) -> tuple[list[Segment], Transcript]:
    """Return segments and transcript of audio with a piece for each string of frames."""
    pieces, start = [], 0
    for each in frames:
        end = start + len(each) * PER_FRAME
        pieces.append(Piece(start, end, start, end))
        start = end
    rules = transcribe_frames(
        pieces, RULES, duration_s=start / RATE, options=SpeechOptions(**options)
    )
    left, segments, result = list(frames), [], None
    try:
        while True:
            step = rules.send(result)
            result = None
            if isinstance(step, Segment):
                segments.append(step)
                continue
            assert isinstance(step, WindowRequest)
            assert step.needs_frames
            result = WindowResult(frames=make_table(left.pop(0)))
    except StopIteration as end:
        return segments, end.value


# ---- tokens


@pytest.mark.parametrize(
    ("frames", "text", "spans"),
    [
        ("", "", []),
        ("___", "", []),
        ("aa_ab", "aab", [(0, 2), (3, 4), (4, 5)]),
        ("_a_a", "aa", [(1, 2), (3, 4)]),
        ("aaaa", "a", [(0, 4)]),
    ],
)
def test_repeats_are_one_token_and_blanks_are_none(
    frames: str, text: str, spans: list[tuple[int, int]]
) -> None:
    tokens = collapse(make_table(frames), BLANK)
    assert decode([token.token_id for token in tokens]) == text
    assert [(token.start, token.end) for token in tokens] == spans


def test_the_score_of_a_token_is_the_mean_over_its_frames() -> None:
    table = make_table("aab")
    table[:, 1] = (-1.0, -3.0, -5.0)
    assert [token.logprob for token in collapse(table, BLANK)] == [-2.0, -5.0]


def make_rows(*rows: tuple[str, int, int]) -> Any:
    return np.array([(LETTERS.index(c), -1.0, *both) for c, *both in rows], dtype=np.float32)


def test_a_transducer_says_where_its_tokens_are() -> None:
    table = make_rows(("a", 0, 2), ("b", 2, 0), (".", 6, 3), (" ", 9, 1), ("c", 9, 4))
    for head, ends in (("tdt", [2, 2, 2, 10, 13]), ("rnnt", [1, 3, 7, 10, 10])):
        rules = FrameRules(
            head=head,  # type: ignore[arg-type]
            blank_id=BLANK,
            rate=RATE,
            samples_per_frame=PER_FRAME,
            decode=decode,
        )
        assert [token.end for token in read_table(table, rules)] == ends
    # A TDT sets marks back to the end of the word before them, and so does Transformers.
    starts = [token.start for token in read_table(table, rules)]
    assert starts == [0, 2, 6, 9, 9]


# ---- words


def make_tokens(text: str) -> list[TimedToken]:
    return [
        TimedToken(token_id=LETTERS.index(c), logprob=-1.0, start=i, end=i + 1)
        for i, c in enumerate(text)
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("   ", []),
        ("abc", [("abc", 0, 2)]),
        ("ab cd", [("ab", 0, 1), ("cd", 3, 4)]),
        ("  ab   cd  ", [("ab", 2, 3), ("cd", 7, 8)]),
        ("a a a", [("a", 0, 0), ("a", 2, 2), ("a", 4, 4)]),
    ],
)
def test_words_are_separated_by_spaces(text: str, words: list[tuple[str, int, int]]) -> None:
    whole, found = find_words(make_tokens(text), decode)
    assert whole == text.strip()
    assert [(whole[word.begin : word.end], word.first, word.last) for word in found] == words


@given(st.text(alphabet=LETTERS[1:], max_size=40))
def test_all_words_are_found_in_their_places(text: str) -> None:
    whole, found = find_words(make_tokens(text), decode)
    assert [whole[word.begin : word.end] for word in found] == text.split()
    assert [text[word.first : word.last + 1] for word in found] == text.split()


# ---- segments


def test_a_segment_ends_at_a_pause_at_a_sentence_and_at_a_piece() -> None:
    segments, transcript = transcribe("a bc." + " d" + "_" * 9 + " e", "_fg", needs_words=True)
    assert [segment.text for segment in segments] == ["a bc.", " d", " e", " fg"]
    assert transcript.text == "a bc. d e fg"
    # The frames of the bar before a word are not part of it.
    assert [(segment.start, segment.end) for segment in segments] == [
        (0.0, 0.5),
        (0.6, 0.7),
        (1.7, 1.8),
        (1.9, 2.1),
    ]
    assert [segment.seek for segment in segments] == [0, 0, 0, 180]
    words = [word.text for segment in segments for word in segment.words]
    assert words == ["a", "bc.", "d", "e", "fg"]
    assert transcript.usage.num_output_tokens == 5 + 2 + 2 + 2
    assert transcript.segments == tuple(segments)


def test_audio_without_words_has_no_segments() -> None:
    segments, transcript = transcribe("____", "  ")
    assert (segments, transcript.text, transcript.duration_s) == ([], "", 0.6)
    assert transcript.language is None


def test_scores_and_words_come_only_if_asked_for() -> None:
    (plain,), _ = transcribe("ab")
    assert (plain.words, plain.scores, plain.avg_logprob) == ((), (), -1.0)
    (scored,), _ = transcribe("ab", needs_logprobs=True)
    assert [(score.text, score.logprob) for score in scored.scores] == [("a", -1.0), ("b", -1.0)]


@given(st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=30), max_size=4))
def test_texts_join_and_times_never_go_back(pieces: list[str]) -> None:
    segments, transcript = transcribe(*pieces, needs_words=True)
    whole = [decode([t.token_id for t in collapse(make_table(piece), BLANK)]) for piece in pieces]
    assert transcript.text == " ".join(text for text in whole if text)
    times = [time for each in segments for word in each.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert all(0 <= time <= transcript.duration_s for time in times)
    assert [segment.index for segment in segments] == list(range(len(segments)))
