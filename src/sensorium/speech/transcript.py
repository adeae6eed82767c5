"""A transcript: the text that a speech model has found in audio, and when each part was said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sensorium.types.errors import RequestError

Task = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word with its time in the audio, in seconds."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScore:
    text: str
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a transcript with its time in the audio, in seconds."""

    index: int  # in the transcript, from 0
    seek: int  # the first frame (of 10 ms) of its window
    start: float
    end: float
    text: str
    token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    # These three values belong to the whole window.
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    words: tuple[Word, ...] = ()
    scores: tuple[TokenScore, ...] = ()  # of its text tokens, if they were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechUsage:
    """The tokens of text and audio that a transcript took in, and those that it put out."""

    num_text_tokens: int = 0
    num_audio_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The whole transcript of an audio item, or the part before an error."""

    text: str
    task: Task
    language: str | None  # ISO 639-1, such as "en"; None if the model does not name it
    duration_s: float
    segments: tuple[Segment, ...]
    usage: SpeechUsage
    error: RequestError | None = None  # why the audio could not be transcribed to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptDelta:
    """The part of a transcript that was added since the previous delta of a stream."""

    index: int  # of the audio item, in the list of the caller
    segments: tuple[Segment, ...] = ()
    done_s: float = 0.0  # the seconds of audio that have been transcribed
    duration_s: float = 0.0  # the seconds of all its audio; 0 if it could not be decoded
    final: Transcript | None = None  # the whole transcript, in its last delta only
