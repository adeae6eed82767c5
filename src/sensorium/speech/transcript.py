"""A transcript: what a speech model has written down of a sound, and when each part was said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sensorium.types.errors import RequestError

Task = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word with its time in the sound, in seconds."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScore:
    """A token of a transcript: its text, its bytes and its log-probability."""

    text: str
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a transcript with its time in the sound, in seconds.

    `seek` is the first frame (of 10 ms) of the window in which it was heard. `avg_logprob`,
    `compression_ratio` and `no_speech_prob` are those of the whole window.
    """

    index: int  # in the transcript, from 0
    seek: int
    start: float
    end: float
    text: str
    token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    words: tuple[Word, ...] = ()
    scores: tuple[TokenScore, ...] = ()  # of its text tokens, if they were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechUsage:
    """What a transcript has cost: tokens of text and of sounds that went in, and tokens out."""

    num_text_tokens: int = 0
    num_audio_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The whole transcript of a sound, or the part before an error."""

    text: str
    task: Task
    language: str | None  # ISO 639-1, such as "en"; None if the model does not tell
    duration_s: float
    segments: tuple[Segment, ...]
    usage: SpeechUsage
    error: RequestError | None = None  # why the sound could not be transcribed to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptDelta:
    """The part of a transcript that was written down since the previous delta of a stream."""

    index: int  # of the sound, in the list of the caller
    segments: tuple[Segment, ...] = ()
    done_s: float = 0.0  # the seconds of the sound that have been transcribed
    duration_s: float = 0.0  # the seconds of the whole sound; 0 if it could not be decoded
    final: Transcript | None = None  # the whole transcript, in its last delta only
