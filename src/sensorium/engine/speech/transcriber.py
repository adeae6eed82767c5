"""Transcribes sounds with an engine that serves many requests at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import closing

from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.speech.models import SpeechModel
from sensorium.engine.speech.sounds import PromptScope, Sound, make_params, read_result
from sensorium.multimodal.media import MediaBytes, MediaItem, PerceptionOptions
from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, Transcript

_FIELD = ("file",)


class AsyncTranscriber:
    """A transcriber of sounds for one frontend. It runs any number of transcripts at a time.

    The windows of a sound run one after the other, because each depends on the text before it.
    Those of different sounds are computed together.
    """

    def __init__(self, engine: AsyncEngine, model: SpeechModel) -> None:
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

    async def transcribe(
        self,
        media: bytes,
        options: SpeechOptions,
        *,
        request_id: str,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Segment | Transcript, None]:
        """Yield the segments of a sound as soon as they are final, and then the whole transcript.

        `media` are the bytes of a file. Raise a `RequestError` if it has no sound that can be
        decoded, or if the model can't do what the options ask for. Closing the generator aborts the
        transcript.
        """
        scope = PromptScope(cache_salt=cache_salt)
        item = MediaItem(path=_FIELD, modality="audio", media=MediaBytes(media))
        perception = PerceptionOptions(cache_salt=cache_salt)
        async with self._engine.perceive(item, perception) as perceived:
            sound = Sound(perceived, self._model.processor, scope)
            with closing(self._model.start(sound, options)) as rules:
                result = None
                try:
                    while True:
                        step = rules.send(result)
                        if isinstance(step, Segment):
                            result = None
                            yield step
                            continue
                        output = await self._engine.generate(
                            sound.make_prompt(step),
                            make_params(step, options),
                            request_id=request_id,
                        )
                        result = read_result(output)
                except StopIteration as end:
                    transcript: Transcript = end.value
        yield transcript
