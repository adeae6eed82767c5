"""The interface of a live session: audio goes in, and events come out.

A server opens sessions from a `LiveSource`, passes samples on in the order in which they arrive,
and sends the events to its client in their order. Whether the model transcribes turn by turn, or
token by token while audio is streaming, makes no difference to the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sensorium.speech.transcript import TokenScore, Transcript

if TYPE_CHECKING:  # metrics import this module, and must not load numpy
    from sensorium.utils.silences import Samples


# The words for delays in OpenAI's API -> milliseconds
DELAYS_MS = {"minimal": 160, "low": 240, "medium": 480, "high": 960, "xhigh": 2400}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDetection:
    """How turns are found: OpenAI's `server_vad`, with its defaults."""

    threshold: float = 0.5  # the least likelihood of a voice in a frame
    prefix_padding_ms: int = 300  # of audio before the voice
    silence_duration_ms: int = 500  # after which a turn has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """What a client may choose about a live session."""

    language: str | None = None  # a code such as "en" or a name such as "english"; None: detected
    prompt: str = ""  # text that comes before the audio, with names or in the style that is wanted
    # How turns are found; `None`: the client commits.
    turn_detection: TurnDetection | None = field(default_factory=TurnDetection)
    needs_logprobs: bool = False
    # How far the text lags behind the audio, for streaming models. `None`: as the model recommends.
    delay_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """An event: a voice is detected, and an item begins."""

    item_id: str
    start_ms: int  # from the start of the session


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """An event: the voice of an item was silent for long enough."""

    item_id: str
    end_ms: int


@dataclass(frozen=True, slots=True)
class Committed:
    """An event: the audio of an item is complete, and waits to be transcribed."""

    item_id: str
    previous_id: str | None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """An event: the next part of the text of an item, which is final."""

    item_id: str
    text: str
    scores: tuple[TokenScore, ...] = ()  # of the tokens of this part, if they were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """An event: an item was transcribed. The deltas together are its text."""

    item_id: str
    transcript: Transcript
    audio_s: float  # of all audio since the previous item: its own, and the silence between them
    # Seconds that the transcription took, without waiting. If the text came while the item was
    # spoken, only those since the end of its audio.
    work_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """An event: an item can't be transcribed. The session continues."""

    item_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Cleared:
    """An event: the audio that was not committed is dropped."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """An event: all audio before a `flush` is transcribed, or has failed."""

    audio_s: float  # of all audio since the start, or since the previous flush


LiveEvent = (
    SpeechStarted | SpeechStopped | Committed | TextDelta | Completed | Failed | Cleared | Flushed
)


class LiveSession(Protocol):
    """A session of one client: it takes audio, and gives out events with the text.

    One task calls the methods, and another one reads the events. A method that takes audio waits
    while too much audio is not transcribed yet, or too many events are not read.
    """

    @property
    def waiting_s(self) -> float:
        """Return the seconds of received audio that are not transcribed or dropped yet."""
        ...

    def configure(self, options: LiveOptions) -> None:
        """Change the options. Other options of turn detection drop the uncommitted audio."""
        ...

    async def append(self, samples: Samples) -> None:
        """Take the next samples, at 16 kHz. Raise a `RequestError` if there is no room for them."""
        ...

    async def commit(self) -> None:
        """End the item now. Raise a `RequestError` if there is no audio for one."""
        ...

    async def clear(self) -> None:
        """Drop the audio that was not committed."""
        ...

    async def flush(self) -> None:
        """Treat all audio as complete, and send `Flushed` when it is transcribed.

        Without turn detection, uncommitted audio counts only if its transcription has begun.
        """
        ...

    def get_events(self) -> AsyncIterator[LiveEvent]:
        """Return an endless iterator over the events, in their order."""
        ...

    async def settle(self) -> None:
        """Wait until the reader has handled all events so far, to keep later answers after them."""
        ...

    async def close(self) -> None:
        """End the session at once, and abort what is being transcribed."""
        ...


class LiveSource(Protocol):
    """A part of the engine that opens live sessions."""

    @property
    def is_streaming(self) -> bool:
        """Return whether text comes while an item is spoken, even without turn detection."""
        ...

    def check(self, options: LiveOptions) -> None:
        """Raise a `RequestError` if the model can't do what the options ask for."""
        ...

    def open(self, options: LiveOptions) -> LiveSession:
        """Return a new session. The caller has to close it."""
        ...
