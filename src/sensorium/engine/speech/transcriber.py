"""Transcribes audio with an engine that serves many requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.speech.audio import AudioSource, PromptScope, make_params, read_result
from sensorium.engine.speech.models import SpeechModel
from sensorium.multimodal.media import MediaBytes, MediaItem
from sensorium.multimodal.pipeline import MediaPipeline
from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, Transcript
from sensorium.speech.windows import Transcription, WindowRequest, WindowResult
from sensorium.types.errors import MissingMediaError
from sensorium.utils.pausing import Pausing

_FIELD = ("file",)
_MODALITY = "audio"


class AsyncTranscriber:
    """A transcriber for one frontend, which runs any number of transcripts at a time.

    The windows of one transcript run one after the other if each depends on the text before it;
    otherwise some run at a time. Windows of different transcripts are computed together.
    """

    def __init__(self, engine: AsyncEngine, model: SpeechModel[Any]) -> None:
        self._engine = engine
        self._model = model

    @property
    def can_translate(self) -> bool:
        return self._model.can_translate

    @property
    def has_segments(self) -> bool:
        return self._model.has_segments

    @property
    def has_words(self) -> bool:
        return self._model.has_words

    def check(self, options: SpeechOptions) -> None:
        self._model.check(options)

    async def transcribe(
        self,
        media: bytes | MediaBytes,
        options: SpeechOptions,
        *,
        request_id: str,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Segment | Transcript, None]:
        """Yield the segments as soon as they are final, and then the whole transcript.

        `media` are the bytes of a file. Raise a `RequestError` if it has no audio that can be
        decoded, or if the model can't follow the options. Closing the generator aborts the
        transcript.
        """
        audio = await self._open(media, PromptScope(cache_salt=cache_salt))
        windows = _Windows(self._engine, audio, options, request_id)
        try:
            with closing(self._model.start(audio, options)) as rules:
                result: WindowResult | None = None
                while not isinstance(step := await _advance_alone(rules, result), Transcript):
                    result = None
                    if isinstance(step, Segment):
                        yield step
                        continue
                    result = await windows.decode(step)
        finally:
            try:
                await windows.close()
            finally:  # also if it is cancelled once more
                audio.release()
        yield step

    async def _open(self, media: bytes | MediaBytes, scope: PromptScope) -> AudioSource:
        source = media if isinstance(media, MediaBytes) else MediaBytes(media)
        item = MediaItem(path=_FIELD, modality=_MODALITY, media=source)

        def begin(pipeline: MediaPipeline, cancelled: Future[None]) -> Pausing[AudioSource]:
            return self._model.open_pausing(
                item, pipeline=pipeline, scope=scope, cancelled=cancelled
            )

        return await self._engine.process_media(
            _MODALITY, begin, drop=lambda unwanted: unwanted.release()
        )


class _Windows:
    """The windows of one transcript that the engine decodes: the due one, and some that follow."""

    def __init__(
        self, engine: AsyncEngine, audio: AudioSource, options: SpeechOptions, request_id: str
    ) -> None:
        self._engine = engine
        self._audio = audio
        self._options = options
        self._request_id = request_id
        self._tasks: dict[int, asyncio.Task[WindowResult]] = {}  # by the first frame of a window
        self._restoring = asyncio.Lock()

    async def decode(self, request: WindowRequest) -> WindowResult:
        """Return the result of a window, and also start the windows that follow it."""
        for each in (request, *request.following):
            if each.first_frame not in self._tasks:
                self._tasks[each.first_frame] = asyncio.create_task(self._run(each))
        return await self._tasks.pop(request.first_frame)

    async def close(self) -> None:
        """Abort the windows that were started and are not awaited any more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, request: WindowRequest) -> WindowResult:
        try:
            return await self._generate(request)
        except MissingMediaError:
            async with self._restoring:  # the audio is decoded once for all windows
                await self._engine.process_media(
                    _MODALITY,
                    lambda _, cancelled: self._audio.restore_pausing(cancelled),
                    drop=lambda _: None,
                )
            return await self._generate(request)

    async def _generate(self, request: WindowRequest) -> WindowResult:
        output = await self._engine.generate(
            self._audio.make_prompt(request),
            make_params(request, self._options),
            request_id=self._request_id,
            group=self._request_id,
        )
        return read_result(output)


async def _advance_alone(
    rules: Transcription, result: WindowResult | None
) -> WindowRequest | Segment | Transcript:
    """Run `_advance` in a thread, because the times of words take up to half a second."""
    work = asyncio.ensure_future(asyncio.to_thread(_advance, rules, result))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})  # a generator that runs can't be closed
        raise


def _advance(
    rules: Transcription, result: WindowResult | None
) -> WindowRequest | Segment | Transcript:
    """Return what comes next: a window to decode, a segment, or the whole transcript."""
    try:
        return rules.send(result)
    except StopIteration as end:
        transcript: Transcript = end.value
        return transcript
