"""Transcripts in every format, read again by libraries of others."""

from __future__ import annotations

import html
import math
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import srt
import webvtt
from hypothesis import given
from hypothesis import strategies as st

from sensorium.speech.formats import (
    TextDeltas,
    as_json,
    as_srt,
    as_text,
    as_verbose,
    as_vtt,
)
from sensorium.speech.transcript import Segment, SpeechUsage, TokenScore, Transcript, Word


def make_segment(index: int = 0, **given: Any) -> Segment:
    return Segment(index=index, **{"seek": 0, "start": 0.0, "end": 1.0, "text": " a", **given})


def make_transcript(*segments: Segment, **given: Any) -> Transcript:
    defaults: dict[str, Any] = {
        "text": "".join(segment.text for segment in segments),
        "task": "transcribe",
        "language": "en",
        "duration_s": 12.01,
        "usage": SpeechUsage(num_text_tokens=3, num_audio_tokens=100, num_output_tokens=7),
    }
    return Transcript(segments=segments, **{**defaults, **given})


# Any text but control characters and halves of pairs, which no format of lines can hold.
TEXTS = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=30) | st.sampled_from(
    [
        "-->",
        "1",
        "00:00:01,000 --> 00:00:02,000",
        "a\n\nb",
        " a\r\n2\n",
        "<b>&amp;",
        "WEBVTT",
        "NOTE",
    ]
)
TIMES = st.floats(0, 400_000, allow_nan=False)
SEGMENTS = st.lists(st.builds(make_segment, start=TIMES, end=TIMES, text=TEXTS), max_size=6)


def as_line(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def as_seconds(written: str) -> float:
    hours, minutes, seconds = written.split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def check_times(cues: list[tuple[float, float]], shown: list[Segment]) -> None:
    """Check that cues have the times of their segments, in order."""
    assert len(cues) == len(shown)
    assert [start for start, _ in cues] == sorted(start for start, _ in cues)
    assert all(end > start for start, end in cues)
    earliest = 0.0
    for (start, end), segment in zip(cues, shown, strict=True):
        earliest = max(earliest, segment.start)
        assert start == pytest.approx(earliest, abs=0.0006)
        assert end == pytest.approx(max(segment.end, start + 0.001), abs=0.0006)


@given(segments=SEGMENTS)
def test_subrip_subtitles_are_read_again(segments: list[Segment]) -> None:
    shown = [segment for segment in segments if as_line(segment.text)]
    cues = list(srt.parse(as_srt(segments)))
    assert [cue.index for cue in cues] == list(range(1, len(shown) + 1))
    expected = [as_line(segment.text).replace("-->", "->") for segment in shown]
    assert [cue.content for cue in cues] == expected
    second = timedelta(seconds=1)
    check_times([(cue.start / second, cue.end / second) for cue in cues], shown)


@given(segments=SEGMENTS)
def test_webvtt_subtitles_are_read_again(segments: list[Segment]) -> None:
    shown = [segment for segment in segments if as_line(segment.text)]
    cues = webvtt.from_string(as_vtt(segments)).captions
    assert [html.unescape(cue.raw_text) for cue in cues] == [as_line(each.text) for each in shown]
    check_times([(as_seconds(cue.start), as_seconds(cue.end)) for cue in cues], shown)


def test_subtitles_look_as_they_should() -> None:
    segments = [
        make_segment(0, start=0.0, end=2.5, text=" Hello."),
        make_segment(1, start=3599.9996, end=3723.0421, text=" A < B & C"),
        make_segment(2, start=3724, end=3725, text="  "),
        make_segment(3, start=3600.5, end=3600.5, text="back"),
    ]
    assert as_srt(segments) == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello.\n\n"
        "2\n01:00:00,000 --> 01:02:03,042\nA < B & C\n\n"
        "3\n01:00:00,500 --> 01:00:00,501\nback\n"
    )
    assert as_vtt(segments) == (
        "WEBVTT\n\n"
        "00:00:00.000 --> 00:00:02.500\nHello.\n\n"
        "01:00:00.000 --> 01:02:03.042\nA &lt; B &amp; C\n\n"
        "01:00:00.500 --> 01:00:00.501\nback\n"
    )


def test_audio_without_speech_has_empty_subtitles() -> None:
    assert (as_srt([]), as_vtt([])) == ("", "WEBVTT\n")
    assert as_text(make_transcript()) == "\n"


def encode(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def test_json_has_the_text_and_the_tokens_that_it_took() -> None:
    transcript = make_transcript(make_segment(text=" Hello."), make_segment(1, text=" You."))
    usage = {
        "type": "tokens",
        "input_tokens": 103,
        "input_token_details": {"text_tokens": 3, "audio_tokens": 100},
        "output_tokens": 7,
        "total_tokens": 110,
    }
    assert encode(as_json(transcript)) == {"text": "Hello. You.", "usage": usage}
    assert as_text(transcript) == "Hello. You.\n"


def test_json_may_have_the_log_probabilities_of_all_tokens() -> None:
    scores = (
        TokenScore(text="é", utf8=b"\xc3\xa9", logprob=-0.5),
        TokenScore(text="\ufffd", utf8=b"\xc3", logprob=-math.inf),
    )
    transcript = make_transcript(
        make_segment(scores=scores[:1]), make_segment(1, scores=scores[1:])
    )
    assert encode(as_json(transcript, has_logprobs=True))["logprobs"] == [
        {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [195]},
    ]


def test_verbose_json_has_what_was_asked_for() -> None:
    words = (Word(text=" Hel", start=0.0, end=0.5), Word(text="lo.", start=0.5, end=1.0))
    segment = make_segment(
        text=" Hello.", token_ids=(5, 6), avg_logprob=math.nan, no_speech_prob=0.5, words=words
    )
    transcript = make_transcript(segment)
    whole = encode(as_verbose(transcript, has_words=True))
    assert list(whole) == ["task", "language", "duration", "text", "words", "segments", "usage"]
    assert (whole["task"], whole["language"]) == ("transcribe", "english")
    assert (whole["duration"], whole["usage"]) == (12.01, {"type": "duration", "seconds": 13})
    assert whole["words"] == [
        {"word": "Hel", "start": 0.0, "end": 0.5},
        {"word": "lo.", "start": 0.5, "end": 1.0},
    ]
    assert whole["segments"] == [
        {
            "id": 0,
            "seek": 0,
            "start": 0.0,
            "end": 1.0,
            "text": " Hello.",
            "tokens": [5, 6],
            "temperature": 0.0,
            "avg_logprob": -9999.0,
            "compression_ratio": 0.0,
            "no_speech_prob": 0.5,
        }
    ]
    assert "words" not in encode(as_verbose(transcript))
    assert "segments" not in encode(as_verbose(transcript, has_segments=False))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"language": "de"}, "german"),
        ({"language": None}, "unknown"),
        ({"language": "xx"}, "xx"),
        ({"language": "de", "task": "translate"}, "english"),
    ],
)
def test_the_language_is_that_of_the_text(given: dict[str, Any], name: str) -> None:
    assert as_verbose(make_transcript(**given)).language == name


@given(st.lists(st.text(st.sampled_from("a \n"), max_size=4)), st.booleans())
def test_parts_of_a_text_are_the_whole_text(texts: list[str], is_empty: bool) -> None:
    """Also if some segments are only white space, or if the text has no segments."""
    whole = "".join(texts).strip()
    deltas = TextDeltas()
    parts = [] if is_empty else [deltas.add(text) for text in texts]
    assert "".join([*parts, deltas.finish(whole)]) == whole
    assert all(part == part.rstrip() for part in parts)
