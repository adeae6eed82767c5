"""Live sessions of models that transcribe whole audio: turn by turn, as voices fall silent.

Back-pressure: a session holds the audio of the current turn and of queued turns. While more than
`MAX_WAITING_S` seconds wait, `append` does not return, and its caller reads no more from the
client. The transcriber works on one turn of a session at a time, so events of items come in the
order of the items.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

from sensorium.speech.formats import TextDeltas, get_text
from sensorium.speech.live.audio import RATE, write_wav
from sensorium.speech.live.session import (
    Cleared,
    Committed,
    Completed,
    Failed,
    Flushed,
    LiveEvent,
    LiveOptions,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
)
from sensorium.speech.live.turns import (
    AudioBufferError,
    TurnBuffer,
    TurnEnded,
    TurnEvent,
    TurnStarted,
)
from sensorium.speech.live.voices import SileroDetector, VoiceDetector
from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, TokenScore, Transcript
from sensorium.types.errors import InvariantError, RequestError
from sensorium.utils.silences import Samples

MAX_WAITING_S = 60.0
_MAX_EVENTS = 64  # that were not read; then the session waits for its reader
STEP = RATE // 4  # samples that are processed at once, so that the event loop is not held up
_MS_PER_S = 1000


class AudioTranscriber(Protocol):
    """A transcriber of whole audio, such as `AsyncTranscriber`."""

    def check(self, options: SpeechOptions) -> None:
        """Raise a `RequestError` if the model can't do what the options ask for."""
        ...

    def transcribe(
        self, media: bytes, options: SpeechOptions, *, request_id: str
    ) -> AsyncGenerator[Segment | Transcript, None]: ...


@dataclass(frozen=True, slots=True)
class _Flush:
    """Marks where a flush was requested, in the queue of turns."""

    audio_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A queued turn of a session."""

    item_id: str
    samples: Samples
    options: LiveOptions
    audio_s: float  # since the end of the previous turn

    @property
    def length_s(self) -> float:
        return len(self.samples) / RATE


class EventQueue:
    """The events of a live session that were not sent to its client yet."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[LiveEvent] = asyncio.Queue(_MAX_EVENTS)

    async def put(self, event: LiveEvent) -> None:
        """Add an event, and wait while too many events are unread."""
        await self._events.put(event)

    async def get_events(self) -> AsyncIterator[LiveEvent]:
        while True:
            event = await self._events.get()
            try:
                yield event
            finally:
                self._events.task_done()

    async def settle(self) -> None:
        await self._events.join()


class TurnSource:
    """A `LiveSource` over a transcriber of whole audio."""

    is_streaming = False

    def __init__(
        self,
        transcriber: AudioTranscriber,
        *,
        make_detector: Callable[[], VoiceDetector] = SileroDetector,
    ) -> None:
        self._transcriber = transcriber
        self._make_detector = make_detector

    def check(self, options: LiveOptions) -> None:
        if options.delay_ms is not None:
            raise RequestError(
                "is not supported by this model, which transcribes turn by turn: leave it out",
                path=("delay",),
            )
        self._transcriber.check(_make_speech_options(options))

    def open(self, options: LiveOptions) -> TurnSession:
        return TurnSession(self._transcriber, options, make_detector=self._make_detector)


class TurnSession(EventQueue):
    """A `LiveSession` that transcribes turn by turn. It needs a running event loop."""

    def __init__(
        self,
        transcriber: AudioTranscriber,
        options: LiveOptions,
        *,
        make_detector: Callable[[], VoiceDetector],
    ) -> None:
        super().__init__()
        self._transcriber = transcriber
        self._options = options
        self._buffer = TurnBuffer(options.turn_detection, make_detector=make_detector)
        self._item_id: str | None = None  # of the turn that has begun
        self._previous_id: str | None = None
        self._counted = 0  # the samples before this one belong to an item, or to a flush
        self._flushed = 0  # the samples before this one belong to a flush
        self._turns: asyncio.Queue[_Turn | _Flush] = asyncio.Queue()
        self._waiting_s = 0.0  # of the turns in the queue, and of the one that is worked on
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._worker = asyncio.create_task(self._work())

    @property
    def waiting_s(self) -> float:
        return self._waiting_s + self._buffer.num_samples / RATE

    def configure(self, options: LiveOptions) -> None:
        if options.turn_detection != self._options.turn_detection:
            self._buffer.configure(options.turn_detection)
            self._item_id = None
        self._options = options

    async def append(self, samples: Samples) -> None:
        for start in range(0, len(samples), STEP):
            await self._has_room.wait()
            for event in self._buffer.add(samples[start : start + STEP]):
                await self._take(event)
            if start:
                await asyncio.sleep(0)  # a long chunk lets others run in between

    async def commit(self) -> None:
        await self._has_room.wait()
        await self._commit(self._buffer.commit())

    async def clear(self) -> None:
        self._buffer.clear()
        self._item_id = None
        await self.put(Cleared())

    async def flush(self) -> None:
        if self._buffer.is_detecting and self._item_id is not None:
            with suppress(AudioBufferError):  # too short for speech
                await self._take(self._buffer.commit())
        self._buffer.clear()
        self._item_id = None
        end = self._buffer.end
        self._turns.put_nowait(_Flush((end - self._flushed) / RATE))
        self._counted = self._flushed = end

    async def close(self) -> None:
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)

    async def _take(self, event: TurnEvent) -> None:
        """Send the events for a turn that begins or ends by detection."""
        if isinstance(event, TurnStarted):
            self._item_id = make_item_id()
            await self.put(SpeechStarted(self._item_id, to_ms(event.start)))
            return
        if self._item_id is None:
            raise InvariantError("a turn has ended that has not begun")
        await self.put(SpeechStopped(self._item_id, to_ms(event.end)))
        await self._commit(event)

    async def _commit(self, turn: TurnEnded) -> None:
        item_id = self._item_id or make_item_id()
        self._item_id = None
        await self.put(Committed(item_id, self._previous_id))
        self._previous_id = item_id
        audio_s = (turn.end - self._counted) / RATE
        self._counted = turn.end
        entry = _Turn(item_id=item_id, samples=turn.samples, options=self._options, audio_s=audio_s)
        self._turns.put_nowait(entry)
        self._add_waiting(entry.length_s)

    def _add_waiting(self, seconds: float) -> None:
        self._waiting_s += seconds
        if self._waiting_s > MAX_WAITING_S:
            self._has_room.clear()
        else:
            self._has_room.set()

    async def _work(self) -> None:
        while True:
            entry = await self._turns.get()
            if isinstance(entry, _Flush):
                await self.put(Flushed(entry.audio_s))
                continue
            try:
                await self._transcribe(entry)
            except Exception as error:  # one turn that fails must not end the session
                await self.put(Failed(entry.item_id, error))
            self._add_waiting(-entry.length_s)

    async def _transcribe(self, turn: _Turn) -> None:
        began, texts = time.monotonic(), TextDeltas()
        parts = self._transcriber.transcribe(
            write_wav(turn.samples),
            _make_speech_options(turn.options),
            request_id=f"realtime-{uuid.uuid4().hex}",
        )
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, Segment):
                    await self._send_text(turn, texts.add(part.text), part.scores)
                    continue
                await self._send_text(turn, texts.finish(get_text(part)))
                await self.put(
                    Completed(
                        item_id=turn.item_id,
                        transcript=part,
                        audio_s=turn.audio_s,
                        work_s=time.monotonic() - began,
                    )
                )
                return
        raise InvariantError("a transcription ended without its transcript")

    async def _send_text(self, turn: _Turn, text: str, scores: tuple[TokenScore, ...] = ()) -> None:
        if text:
            await self.put(TextDelta(turn.item_id, text, scores))


def _make_speech_options(options: LiveOptions) -> SpeechOptions:
    return SpeechOptions(
        language=options.language, prompt=options.prompt, needs_logprobs=options.needs_logprobs
    )


def make_item_id() -> str:
    return f"item_{uuid.uuid4().hex[:24]}"


def to_ms(num_samples: int) -> int:
    return num_samples * _MS_PER_S // RATE
