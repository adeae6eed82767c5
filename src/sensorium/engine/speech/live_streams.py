"""Live sessions of streaming models: the text of an item comes while it is spoken.

Each item is one request of the engine, which grows with its audio. With turn detection an item is
what is said between two silences, and the silences are not sent to the model. Without it an item
continues until it is committed, for hours if need be.

Back-pressure: while more than `MAX_WAITING_S` seconds were sent to the engine and have no text yet,
`append` does not return, and its caller reads no more from the client.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.audio_request import AudioRequest
from sensorium.engine.speech.live import MAX_WAITING_S, STEP, EventQueue, make_item_id, to_ms
from sensorium.engine.speech.streamed import StreamedModel
from sensorium.speech.formats import TextDeltas
from sensorium.speech.live.audio import RATE
from sensorium.speech.live.session import (
    Cleared,
    Committed,
    Completed,
    Failed,
    Flushed,
    LiveOptions,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
)
from sensorium.speech.live.turns import (
    EMPTY_CODE,
    MIN_COMMIT_S,
    AudioBufferError,
    TurnBuffer,
    TurnEnded,
    TurnEvent,
    TurnStarted,
)
from sensorium.speech.live.voices import SileroDetector, VoiceDetector
from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, SpeechUsage, TokenScore, Transcript
from sensorium.types.errors import RequestError
from sensorium.types.outputs import CompletionDelta
from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams
from sensorium.utils.silences import Samples

_MS_PER_S = 1000


@dataclass(frozen=True, slots=True)
class _Flush:
    """Marks where a flush was requested, in the queue of items."""

    audio_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Item:
    """An item: the speech until the next commit, and the request that transcribes it."""

    item_id: str
    request: AudioRequest
    num_prompt_tokens: int
    needs_logprobs: bool
    num_samples: int = 0
    num_positions: int = 0  # that were sent to the engine
    num_tokens: int = 0  # that came back
    ended: float | None = None  # when its audio was complete
    audio_s: float = 0.0  # since the previous item, with the silence between them
    is_committed: bool = False
    is_dropped: bool = False
    reading: asyncio.Task[None] | None = None
    texts: TextDeltas = field(default_factory=TextDeltas)
    scores: list[TokenScore] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        """Return how many positions wait for a token. The prompt's last one gets the first."""
        return max(0, self.num_positions + 1 - self.num_prompt_tokens - self.num_tokens)


class StreamSource:
    """A `LiveSource` over an engine with a streaming model."""

    is_streaming = True

    def __init__(
        self,
        engine: AsyncEngine,
        model: StreamedModel,
        *,
        make_detector: Callable[[], VoiceDetector] = SileroDetector,
    ) -> None:
        self._engine = engine
        self._model = model
        self._make_detector = make_detector

    def check(self, options: LiveOptions) -> None:
        self._model.check(SpeechOptions(language=options.language, prompt=options.prompt))
        if options.delay_ms is not None:
            try:
                self._model.processor.count_delay_tokens(options.delay_ms)
            except RequestError as error:
                raise RequestError(str(error), path=("delay",)) from error

    def open(self, options: LiveOptions) -> StreamSession:
        return StreamSession(self._engine, self._model, options, make_detector=self._make_detector)


class StreamSession(EventQueue):
    """A `LiveSession` in which the text of an item comes while it is spoken."""

    def __init__(
        self,
        engine: AsyncEngine,
        model: StreamedModel,
        options: LiveOptions,
        *,
        make_detector: Callable[[], VoiceDetector],
    ) -> None:
        super().__init__()
        self._engine = engine
        self._model = model
        self._options = options
        self._buffer = TurnBuffer(options.turn_detection, make_detector=make_detector)
        self._num_samples = 0  # of the session so far
        self._counted = 0  # the samples before this one belong to an item, or to a flush
        self._flushed = 0  # the samples before this one belong to a flush
        self._item: _Item | None = None  # the one that is being spoken
        self._turn_id = ""  # of the item of the last turn that began
        self._previous_id: str | None = None
        self._items: asyncio.Queue[_Item | _Flush] = asyncio.Queue()
        self._unread: list[_Item] = []  # those that are not transcribed to their end
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._reader = asyncio.create_task(self._read())

    @property
    def waiting_s(self) -> float:
        num_positions = sum(item.num_waiting for item in self._unread)
        return num_positions * self._model.processor.token_ms / _MS_PER_S

    def configure(self, options: LiveOptions) -> None:
        if options.turn_detection != self._options.turn_detection:
            self._buffer.configure(options.turn_detection)
            self._drop()
        self._options = options

    async def append(self, samples: Samples) -> None:
        for start in range(0, len(samples), STEP):
            await self._has_room.wait()
            part = samples[start : start + STEP]
            self._num_samples += len(part)
            if self._buffer.is_detecting:
                for event in self._buffer.add(part):
                    await self._take(event)
                if self._item is not None:
                    self._feed(self._item, self._buffer.take())
            else:
                self._buffer.skip(len(part))
                item = self._item or await self._begin(make_item_id())
                self._feed(item, part)
            if start:
                await asyncio.sleep(0)  # a long chunk lets others run in between

    async def commit(self) -> None:
        item = self._item
        if item is None or item.num_samples < MIN_COMMIT_S * RATE:
            raise AudioBufferError(
                f"There is no speech in the buffer to commit, or less than {MIN_COMMIT_S:g} s.",
                EMPTY_CODE,
            )
        await self._complete(item)

    async def clear(self) -> None:
        self._buffer.clear()
        self._drop()
        await self.put(Cleared())

    async def flush(self) -> None:
        if self._item is not None:
            await self._complete(self._item)
        self._buffer.clear()
        self._items.put_nowait(_Flush((self._num_samples - self._flushed) / RATE))
        self._counted = self._flushed = self._num_samples

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        for item in self._unread:
            item.request.close()

    # ---- the audio of an item

    async def _take(self, event: TurnEvent) -> None:
        """Begin or end an item, because a turn begins or ends by detection."""
        if isinstance(event, TurnStarted):
            self._turn_id = make_item_id()
            await self.put(SpeechStarted(self._turn_id, to_ms(event.start)))
            try:
                await self._begin(self._turn_id)
            except Exception as error:  # the next turn may find room, or another engine
                await self.put(Failed(self._turn_id, error))
            return
        await self.put(SpeechStopped(self._turn_id, to_ms(event.end)))
        if self._item is not None:
            self._feed(self._item, event.samples)
            await self._end(self._item, event)

    async def _begin(self, item_id: str) -> _Item:
        options, processor = self._options, self._model.processor
        request = await self._engine.open_audio(
            SamplingParams(
                temperature=0.0,
                max_tokens=None,
                ignore_eos=True,  # the audio decides when it ends
                logprobs=0 if options.needs_logprobs else None,
            ),
            request_id=f"realtime-{uuid.uuid4().hex}",
            delay_ms=options.delay_ms,
        )
        delay_ms = processor.default_delay_ms if options.delay_ms is None else options.delay_ms
        item = _Item(
            item_id=item_id,
            request=request,
            num_prompt_tokens=len(processor.make_prompt(delay_ms)),
            needs_logprobs=options.needs_logprobs,
        )
        self._item = item
        self._unread.append(item)
        self._items.put_nowait(item)
        return item

    def _feed(self, item: _Item, samples: Samples) -> None:
        item.num_samples += len(samples)
        item.num_positions += item.request.append(samples)
        self._look_for_room()

    async def _complete(self, item: _Item) -> None:
        """End an item now, with the audio that the detector has held back."""
        if self._buffer.is_detecting:
            self._feed(item, self._buffer.take(is_last=True))
        await self._end(item)

    async def _end(self, item: _Item, turn: TurnEnded | None = None) -> None:
        """End the audio of an item. The rest of its text follows."""
        self._item = None
        item.num_positions += item.request.end()
        end = self._num_samples if turn is None else turn.end
        item.audio_s, self._counted = (end - self._counted) / RATE, end
        item.ended = time.monotonic()
        await self._announce(item)

    async def _announce(self, item: _Item) -> None:
        if not item.is_committed:
            item.is_committed = True
            await self.put(Committed(item.item_id, self._previous_id))
            self._previous_id = item.item_id

    def _drop(self) -> None:
        """Discard the item that is being spoken, with its text."""
        item, self._item = self._item, None
        if item is None:
            return
        item.is_dropped = True
        item.request.close()
        if item.reading is not None:
            item.reading.cancel()

    def _look_for_room(self) -> None:
        if self.waiting_s > MAX_WAITING_S:
            self._has_room.clear()
        else:
            self._has_room.set()

    # ---- the text of items

    async def _read(self) -> None:
        while True:
            entry = await self._items.get()
            if isinstance(entry, _Flush):
                await self.put(Flushed(entry.audio_s))
                continue
            if not entry.is_dropped:
                entry.reading = asyncio.create_task(self._read_item(entry))
                try:
                    await asyncio.wait({entry.reading})
                finally:
                    entry.reading.cancel()
            entry.request.close()
            self._unread.remove(entry)
            if self._item is entry:
                self._item = None  # it ended by itself, and audio that follows is another item
            self._look_for_room()

    async def _read_item(self, item: _Item) -> None:
        try:
            async for delta in item.request.deltas:
                for part in delta.deltas:
                    await self._take_text(item, part)
                if delta.final is not None:
                    await self._finish(item, delta.final.outputs[0].finish_reason)
        except Exception as error:  # one item that fails must not end the session
            await self.put(Failed(item.item_id, error))

    async def _take_text(self, item: _Item, part: CompletionDelta) -> None:
        item.num_tokens += len(part.token_ids)
        self._look_for_room()
        scores = self._make_scores(part) if item.needs_logprobs else ()
        item.scores += scores
        text = item.texts.add(part.text)
        if text:
            await self.put(TextDelta(item.item_id, text, scores))

    def _make_scores(self, part: CompletionDelta) -> tuple[TokenScore, ...]:
        tokenizer, silent_ids = self._model.tokenizer, self._model.silent_ids
        pairs = zip(part.token_ids, part.logprobs or (), strict=False)
        return tuple(
            TokenScore(
                text=tokenizer.decode([token_id]),
                utf8=tokenizer.get_bytes(token_id),
                logprob=entry[token_id].logprob,
            )
            for token_id, entry in pairs
            if token_id not in silent_ids
        )

    async def _finish(self, item: _Item, reason: FinishReason | None) -> None:
        await self._announce(item)
        duration_s = item.num_samples / RATE
        if reason is FinishReason.LENGTH:
            written_s = item.num_tokens * self._model.processor.token_ms / _MS_PER_S
            error = RequestError(
                f"the model's context is full: {written_s:g} s of this item are transcribed, and "
                "the rest of it is lost. Commit more often, or start the server with a larger "
                "--max-model-len if the model has room for it"
            )
            await self.put(Failed(item.item_id, error))
            return
        text = item.texts.sent
        segment = Segment(
            index=0, seek=0, start=0.0, end=duration_s, text=text, scores=tuple(item.scores)
        )
        transcript = Transcript(
            text=text,
            task="transcribe",
            language=None,
            duration_s=duration_s,
            segments=(segment,) if text else (),
            usage=SpeechUsage(
                num_audio_tokens=item.num_positions, num_output_tokens=item.num_tokens
            ),
        )
        work_s = 0.0 if item.ended is None else time.monotonic() - item.ended
        await self.put(
            Completed(
                item_id=item.item_id, transcript=transcript, audio_s=item.audio_s, work_s=work_s
            )
        )
