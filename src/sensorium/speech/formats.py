"""Writes transcripts in the formats of OpenAI's API: json, text, srt, verbose_json and vtt.

The structs are the API's JSON objects, in its order of fields. Rules of subtitles:
  1. Each cue has one line of text. Segments without text have no cue.
  2. Cues begin in the order of time, and each is at least a millisecond long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from msgspec import UNSET, Struct, UnsetType

from sensorium.speech.languages import NAMES
from sensorium.speech.transcript import Segment, SpeechUsage, Task, TokenScore, Transcript

SpeechFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
SPEECH_FORMATS: tuple[SpeechFormat, ...] = get_args(SpeechFormat)
_UNKNOWN = "unknown"  # the language if the model does not name it
_LEAST = -9999.0  # in place of minus infinity, which JSON can't write


class InputTokenDetails(Struct, frozen=True, kw_only=True):
    text_tokens: int
    audio_tokens: int


class TokenUsage(Struct, frozen=True, kw_only=True):
    type: Literal["tokens"] = "tokens"
    input_tokens: int
    input_token_details: InputTokenDetails
    output_tokens: int
    total_tokens: int


class DurationUsage(Struct, frozen=True, kw_only=True):
    type: Literal["duration"] = "duration"
    seconds: int  # rounded up


class SpeechLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class SpeechAnswer(Struct, frozen=True, kw_only=True):
    """A transcript in the format "json"."""

    text: str
    logprobs: list[SpeechLogprob] | UnsetType = UNSET
    usage: TokenUsage


class SpeechSegment(Struct, frozen=True, kw_only=True):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class SpeechWord(Struct, frozen=True, kw_only=True):
    word: str
    start: float
    end: float


class VerboseSpeechAnswer(Struct, frozen=True, kw_only=True):
    """A transcript in the format "verbose_json"."""

    task: Task
    language: str  # the English name of the language of `text`
    duration: float
    text: str
    words: list[SpeechWord] | UnsetType = UNSET
    segments: list[SpeechSegment] | UnsetType = UNSET
    usage: DurationUsage


def as_json(transcript: Transcript, *, has_logprobs: bool = False) -> SpeechAnswer:
    """Return a transcript in the format "json", optionally with log-probabilities of its tokens."""
    scores = (score for segment in transcript.segments for score in segment.scores)
    return SpeechAnswer(
        text=get_text(transcript),
        logprobs=make_logprobs(scores) if has_logprobs else UNSET,
        usage=make_token_usage(transcript.usage),
    )


def as_text(transcript: Transcript) -> str:
    """Return a transcript in the format "text", with a line end."""
    return get_text(transcript) + "\n"


class TextDeltas:
    """The parts of a transcript's text: joined, they are `as_text` without its line end."""

    def __init__(self) -> None:
        self.sent = ""
        self._held = ""  # white space, until more text comes

    def add(self, text: str) -> str:
        """Return the next part, which may be empty, for the text of a segment."""
        text = self._held + text
        text = text if self.sent else text.lstrip()
        part = text.rstrip()
        self._held = text[len(part) :]
        self.sent += part
        return part

    def finish(self, whole: str) -> str:
        """Return the part of the whole text that no segment had."""
        return whole[len(self.sent) :] if whole.startswith(self.sent) else ""


def as_verbose(
    transcript: Transcript, *, has_segments: bool = True, has_words: bool = False
) -> VerboseSpeechAnswer:
    """Return a transcript in the format "verbose_json". A translation's language is English."""
    code = "en" if transcript.task == "translate" else transcript.language or _UNKNOWN
    return VerboseSpeechAnswer(
        task=transcript.task,
        language=NAMES.get(code, code),
        duration=transcript.duration_s,
        text=get_text(transcript),
        words=list(_make_words(transcript.segments)) if has_words else UNSET,
        segments=[_make_segment(each) for each in transcript.segments] if has_segments else UNSET,
        usage=DurationUsage(seconds=math.ceil(transcript.duration_s)),
    )


def as_srt(segments: Iterable[Segment]) -> str:
    """Return the subtitles of a transcript as SubRip, numbered from 1."""
    blocks = [
        f"{number}\n{_write_time(start, ',')} --> {_write_time(end, ',')}\n"
        # The format has no escapes, and an arrow is the sign of a line with times.
        f"{text.replace('-->', '->')}\n"
        for number, (start, end, text) in enumerate(_make_cues(segments), start=1)
    ]
    return "\n".join(blocks)


def as_vtt(segments: Iterable[Segment]) -> str:
    blocks = [
        f"{_write_time(start, '.')} --> {_write_time(end, '.')}\n{_escape(text)}\n"
        for start, end, text in _make_cues(segments)
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def as_plain(transcript: Transcript, form: SpeechFormat) -> str:
    if form == "text":
        return as_text(transcript)
    return as_srt(transcript.segments) if form == "srt" else as_vtt(transcript.segments)


def get_text(transcript: Transcript) -> str:
    return transcript.text.strip()


def make_logprobs(scores: Iterable[TokenScore]) -> list[SpeechLogprob]:
    return [
        SpeechLogprob(score.text, _make_finite(score.logprob), list(score.utf8)) for score in scores
    ]


def make_token_usage(usage: SpeechUsage) -> TokenUsage:
    num_input_tokens = usage.num_text_tokens + usage.num_audio_tokens
    return TokenUsage(
        input_tokens=num_input_tokens,
        input_token_details=InputTokenDetails(
            text_tokens=usage.num_text_tokens, audio_tokens=usage.num_audio_tokens
        ),
        output_tokens=usage.num_output_tokens,
        total_tokens=num_input_tokens + usage.num_output_tokens,
    )


def _make_segment(segment: Segment) -> SpeechSegment:
    return SpeechSegment(
        id=segment.index,
        seek=segment.seek,
        start=segment.start,
        end=segment.end,
        text=segment.text,
        tokens=list(segment.token_ids),
        temperature=segment.temperature,
        avg_logprob=_make_finite(segment.avg_logprob),
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob,
    )


def _make_words(segments: Iterable[Segment]) -> Iterator[SpeechWord]:
    for segment in segments:
        for word in segment.words:
            yield SpeechWord(word=word.text.strip(), start=word.start, end=word.end)


def _make_cues(segments: Iterable[Segment]) -> Iterator[tuple[int, int, str]]:
    """Yield the start and the end in milliseconds, and the text, of each subtitle."""
    earliest = 0
    for segment in segments:
        # Not `split()`: it would also change spaces that belong to the text of some languages.
        lines = (line.strip() for line in segment.text.splitlines())
        text = " ".join(line for line in lines if line)
        if text:
            start = max(round(segment.start * 1000), earliest)
            yield start, max(round(segment.end * 1000), start + 1), text
            earliest = start


def _write_time(num_ms: int, mark: str) -> str:
    seconds, num_ms = divmod(num_ms, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{mark}{num_ms:03d}"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _make_finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST
