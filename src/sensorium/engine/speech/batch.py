"""Transcribes sounds with an engine in the same process, all of one call together."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from tqdm import tqdm

from sensorium.engine.speech.models import SpeechModel
from sensorium.engine.speech.sounds import PromptScope, SoundSource, make_params, read_result
from sensorium.multimodal.media import MediaItem
from sensorium.multimodal.pipeline import MediaPipeline
from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, Task, Transcript
from sensorium.speech.windows import Transcription, WindowRequest, WindowResult
from sensorium.types.errors import MissingMediaError, RequestError, at
from sensorium.types.outputs import RequestOutput
from sensorium.types.request import Prompt
from sensorium.types.sampling import SamplingParams
from sensorium.utils.pausing import run_through


class TranscribeKwargs(TypedDict, total=False):
    """The options of `LLM.transcribe`. `SpeechOptions` explains them."""

    task: Task
    language: str | None
    prompt: str
    temperature: float | None
    needs_segments: bool
    needs_words: bool
    needs_logprobs: bool
    sampling: SamplingParams


def make_items(sounds: Any) -> list[MediaItem]:
    """Return the sounds that a caller gave: one or a list of them.

    A sound is the path of a file, an address, the bytes of a file, or samples with their rate.
    """
    entries = sounds if isinstance(sounds, list) else [sounds]
    items = []
    for index, entry in enumerate(entries):
        with at("sounds", index):
            items.append(MediaItem(path=("sounds", index), modality="audio", media=_read(entry)))
    return items


def _read(sound: Any) -> Any:
    is_address = isinstance(sound, str) and (":" in sound[:8] and not Path(sound).exists())
    if is_address or not isinstance(sound, str | os.PathLike):
        return sound
    try:
        return Path(sound).read_bytes()
    except OSError as error:
        raise RequestError(f"the file {os.fspath(sound)!r} can't be read: {error}") from error


@dataclass(slots=True, kw_only=True)
class _Running:
    """A transcript that has begun: its sound, and the rules that ask for windows of it."""

    index: int
    sound: SoundSource
    rules: Transcription


class TranscriptBatch:
    """The transcripts of one call, in one process.

    `add` gives a prompt to the engine and returns the id of its request. `step` computes a step of
    the engine, and returns the outputs of the requests that have ended.
    """

    def __init__(
        self,
        model: SpeechModel[Any],
        pipeline: MediaPipeline,
        options: SpeechOptions,
        *,
        add: Callable[[Prompt, SamplingParams], str],
        step: Callable[[], Iterable[RequestOutput]],
        max_running: int,
    ) -> None:
        self._model = model
        self._pipeline = pipeline
        self._options = options
        self._add = add
        self._step = step
        self._max_running = max_running
        self._running: dict[str, _Running] = {}  # by the id of the request of its window
        self._transcripts: dict[int, Transcript] = {}

    def run(self, items: Sequence[MediaItem], bar: tqdm[Any]) -> list[Transcript]:
        """Transcribe all sounds, and return the transcripts in the same order.

        `bar` advances by the seconds of sound that are done.
        """
        todo = deque(enumerate(items))
        try:
            while todo or self._running:
                while todo and len(self._running) < self._max_running:
                    self._begin(*todo.popleft())
                for output in self._step() if self._running else ():
                    running = self._running.pop(output.request_id, None)
                    if running is not None:
                        self._continue(running, output, bar)
        finally:
            for running in self._running.values():
                self._end(running)
        return [self._transcripts[index] for index in range(len(items))]

    def _begin(self, index: int, item: MediaItem) -> None:
        opening = self._model.open_pausing(item, pipeline=self._pipeline, scope=PromptScope())
        sound: SoundSource = run_through(opening)
        try:
            rules = self._model.start(sound, self._options)
        except BaseException:
            sound.release()
            raise
        self._advance(_Running(index=index, sound=sound, rules=rules), None)

    def _continue(self, running: _Running, output: RequestOutput, bar: tqdm[Any]) -> None:
        if output.error is not None:
            self._end(running)
            with at("sounds", running.index):
                raise output.error
        if self._advance(running, read_result(output)):
            bar.update(running.sound.duration_s)

    def _advance(self, running: _Running, result: WindowResult | None) -> bool:
        """Go on with a transcript up to its next window. Return whether it has ended."""
        try:
            step = running.rules.send(result)
            while isinstance(step, Segment):
                step = next(running.rules)
            self._ask(running, step)
        except StopIteration as end:
            self._transcripts[running.index] = end.value
        except BaseException:
            self._end(running)
            raise
        else:
            return False
        self._end(running)
        return True

    def _ask(self, running: _Running, request: WindowRequest) -> None:
        params = make_params(request, self._options)
        try:
            request_id = self._add(running.sound.make_prompt(request), params)
        except MissingMediaError:
            run_through(running.sound.restore_pausing())
            request_id = self._add(running.sound.make_prompt(request), params)
        self._running[request_id] = running

    def _end(self, running: _Running) -> None:
        running.rules.close()
        running.sound.release()


def make_options(given: Mapping[str, Any]) -> SpeechOptions:
    """Return the options of a call, or raise a `RequestError` that names an unknown one."""
    unknown = sorted(set(given) - set(TranscribeKwargs.__annotations__))
    if unknown:
        known = ", ".join(TranscribeKwargs.__annotations__)
        raise RequestError(f"unknown option(s) {', '.join(unknown)} (known: {known})")
    return SpeechOptions(**given)
