"""Transcribes audio with an engine in the same process, all items of one call together.

An item that fails does not affect the others: its transcript has the error.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, get_args

from tqdm import tqdm

from sensorium.engine.failures import make_failure
from sensorium.engine.speech.audio import AudioSource, PromptScope, make_params, read_result
from sensorium.engine.speech.models import SpeechModel
from sensorium.multimodal.media import MediaItem
from sensorium.multimodal.pipeline import MediaPipeline
from sensorium.speech.instructions import CANNOT_TRANSLATE
from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, SpeechUsage, Task, Transcript, TranscriptDelta
from sensorium.speech.windows import Transcription, WindowRequest, WindowResult
from sensorium.types.errors import MissingMediaError, RequestError
from sensorium.types.options import join_words
from sensorium.types.outputs import RequestOutput
from sensorium.types.request import Prompt
from sensorium.types.sampling import SamplingParams
from sensorium.utils.pausing import run_through

_MODALITY = "audio"
_MAX_BEGIN_S = 1.0  # the time for which audio is decoded between two steps


class TranscribeKwargs(TypedDict, total=False):
    """The options of `LLM.transcribe`. `SpeechOptions` explains them."""

    task: Task
    language: str | None
    prompt: str
    temperature: float | None
    carries_text: bool | None
    needs_segments: bool
    needs_words: bool
    needs_logprobs: bool
    sampling: SamplingParams


@dataclass(slots=True, kw_only=True)
class _Running:
    """A transcript that has begun: its audio, and the rules that ask for windows of it."""

    index: int
    audio: AudioSource
    rules: Transcription
    segments: list[Segment] = field(default_factory=list)
    done_s: float = 0.0
    due_frame: int = 0  # the first frame of the window that the rules wait for
    asked_frames: set[int] = field(default_factory=set)
    outputs: dict[int, RequestOutput] = field(default_factory=dict)  # of windows that are not due

    def take_due(self) -> RequestOutput | None:
        """Return the output of the window that is due, or `None` if it has not ended."""
        output = self.outputs.pop(self.due_frame, None)
        if output is not None:
            self.asked_frames.discard(self.due_frame)  # the rules may ask for it once more
        return output


class TranscriptBatch:
    """The transcripts of one call, in one process.

    `add` gives a prompt to the engine and returns a request id. `step` computes a step, unless one
    of the given requests has ended already, and returns the outputs of those that have.
    """

    def __init__(
        self,
        model: SpeechModel[Any],
        pipeline: MediaPipeline,
        options: SpeechOptions,
        *,
        add: Callable[[Prompt, SamplingParams], str],
        step: Callable[[Collection[str]], Iterable[RequestOutput]],
        abort: Callable[[Sequence[str]], None],
        max_running: int,
    ) -> None:
        self._model = model
        self._pipeline = pipeline
        self._options = options
        self._add = add
        self._step = step
        self._abort = abort
        self._max_running = max_running
        # request id -> the transcript to which its window belongs, and the window's first frame
        self._running: dict[str, tuple[_Running, int]] = {}

    def run(self, audios: Sequence[Any]) -> Generator[TranscriptDelta, None, None]:
        """Transcribe all audio together, and yield new segments as soon as they are final.

        Each item has exactly one delta with a `final`, which has the error if the item failed. An
        item is the path of a file, a URL, the bytes of a file, or samples with their rate.
        """
        todo = deque(enumerate(audios))
        try:
            while todo or self._running:
                # Many items begin together, so that their windows share steps. But the text of
                # the first ones must not wait until hundreds of long ones are decoded.
                deadline = time.monotonic() + _MAX_BEGIN_S
                while todo and len(self._running) < self._max_running:
                    yield self._begin(*todo.popleft())
                    if time.monotonic() > deadline:
                        break
                for output in self._step(self._running) if self._running else ():
                    delta = self._continue(output.request_id, output)
                    if delta is not None:
                        yield delta
        finally:
            while self._running:
                self._end(next(iter(self._running.values()))[0])

    def _begin(self, index: int, audio: Any) -> TranscriptDelta:
        try:
            running = self._start(index, audio)
        except Exception as error:  # a bug fails this item only, not the others of the call
            final = self._make_failed(index, error)
            return TranscriptDelta(index=index, final=final)
        return self._advance(running, None)

    def _start(self, index: int, audio: Any) -> _Running:
        item = MediaItem(path=(), modality=_MODALITY, media=_read(audio))
        opening = self._model.open_pausing(item, pipeline=self._pipeline, scope=PromptScope())
        opened: AudioSource = run_through(opening)
        try:
            rules = self._model.start(opened, self._options)
        except BaseException:
            opened.release()
            raise
        return _Running(index=index, audio=opened, rules=rules)

    def _continue(self, request_id: str, output: RequestOutput) -> TranscriptDelta | None:
        """Take a window's result; return the next delta, or `None` if another window is due."""
        asked = self._running.pop(request_id, None)
        if asked is None:  # its transcript has failed in another window
            return None
        running, first_frame = asked
        running.outputs[first_frame] = output
        due = running.take_due()
        return None if due is None else self._advance(running, due)

    def _advance(self, running: _Running, output: RequestOutput | None) -> TranscriptDelta:
        """Continue a transcript up to a window without a result, and return its next delta."""
        num_before, final = len(running.segments), None
        try:
            step = running.rules.send(_read_result(output))
            while isinstance(step, Segment) or (output := self._ask(running, step)) is not None:
                if isinstance(step, Segment):
                    running.segments.append(step)
                    running.done_s = max(running.done_s, step.end)
                    step = next(running.rules)
                else:
                    step = running.rules.send(_read_result(output))
        except StopIteration as end:
            self._end(running)
            final = end.value
            running.done_s = running.audio.duration_s
        except Exception as error:  # a bug fails this item only, not the others of the call
            self._end(running)
            final = self._make_failed(running.index, error, running)
        except BaseException:
            self._end(running)
            raise
        return _make_delta(running, running.segments[num_before:], final)

    def _ask(self, running: _Running, request: WindowRequest) -> RequestOutput | None:
        """Submit a window and those that follow it; return its output, or `None` if it runs."""
        for each in (request, *request.following):
            if each.first_frame not in running.asked_frames:
                running.asked_frames.add(each.first_frame)
                self._running[self._add_window(running, each)] = running, each.first_frame
        # Windows of silence have no segments, but they are done as well.
        share = request.first_frame / max(1, running.audio.num_frames)
        running.done_s = max(running.done_s, share * running.audio.duration_s)
        running.due_frame = request.first_frame
        return running.take_due()

    def _add_window(self, running: _Running, request: WindowRequest) -> str:
        params = make_params(request, self._options)
        try:
            return self._add(running.audio.make_prompt(request), params)
        except MissingMediaError:
            run_through(running.audio.restore_pausing())
            return self._add(running.audio.make_prompt(request), params)

    def _end(self, running: _Running) -> None:
        left = [name for name, (owner, _) in self._running.items() if owner is running]
        self._abort(left)
        for name in left:
            del self._running[name]
        running.rules.close()
        running.audio.release()

    def _make_failed(
        self, index: int, error: Exception, running: _Running | None = None
    ) -> Transcript:
        segments = () if running is None else tuple(running.segments)
        return Transcript(
            text="".join(segment.text for segment in segments).strip(),
            task=self._options.task,
            language=self._options.language,
            duration_s=0.0 if running is None else running.audio.duration_s,
            segments=segments,
            usage=SpeechUsage(),
            error=make_failure(error, f"audio {index}"),
        )


def _read(audio: Any) -> Any:
    """Return the bytes of audio that is given as a file's path, and any other audio unchanged."""
    is_address = isinstance(audio, str) and (":" in audio[:8] and not Path(audio).exists())
    if is_address or not isinstance(audio, str | os.PathLike):
        return audio
    try:
        return Path(audio).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(f"the file {os.fspath(audio)!r} can't be read: {reason}") from error


def _read_result(output: RequestOutput | None) -> WindowResult | None:
    """Return the result in a window's output, or `None` for no output; raise the output's error."""
    if output is None:
        return None
    if output.error is not None:
        raise output.error
    return read_result(output)


def _make_delta(
    running: _Running, segments: Sequence[Segment], final: Transcript | None
) -> TranscriptDelta:
    return TranscriptDelta(
        index=running.index,
        segments=tuple(segments),
        done_s=min(running.done_s, running.audio.duration_s),
        duration_s=running.audio.duration_s,
        final=final,
    )


class AudioProgress:
    """A progress bar in seconds of audio, which grows as the lengths of items become known."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar
        self._times: dict[int, tuple[float, float]] = {}  # index -> seconds done, and all seconds

    def add(self, delta: TranscriptDelta) -> None:
        # An item that failed is done.
        done_s = delta.done_s if delta.final is None else delta.duration_s
        self._times[delta.index] = (done_s, delta.duration_s)
        self._bar.total = round(sum(duration_s for _, duration_s in self._times.values()))
        self._bar.update(round(sum(done_s for done_s, _ in self._times.values())) - self._bar.n)


def finish_transcripts(deltas: Iterable[TranscriptDelta], *, use_tqdm: bool) -> list[Transcript]:
    """Run transcripts to their end, and return them in the order of their items."""
    finals: dict[int, Transcript] = {}
    with tqdm(disable=not use_tqdm, unit="s", desc="transcribe") as bar:
        progress = AudioProgress(bar)
        for delta in deltas:
            progress.add(delta)
            if delta.final is not None:
                finals[delta.index] = delta.final
    return [finals[index] for index in sorted(finals)]


def make_options(given: Mapping[str, Any], model: SpeechModel[Any]) -> SpeechOptions:
    """Return the options of a call, or raise a `RequestError` that names an invalid one."""
    unknown = sorted(set(given) - set(TranscribeKwargs.__annotations__))
    if unknown:
        known = ", ".join(TranscribeKwargs.__annotations__)
        raise RequestError(f"unknown option(s) {', '.join(unknown)} (known: {known})")
    options = SpeechOptions(**given)
    _check_values(options)
    if options.needs_words and not model.has_words:
        raise RequestError("this model does not give the times of words", path=("needs_words",))
    if options.needs_segments and not model.has_segments:
        raise RequestError(
            "this model does not give the times of segments", path=("needs_segments",)
        )
    if options.task == "translate" and not model.can_translate:
        raise RequestError(CANNOT_TRANSLATE, path=("task",))
    return options


def _check_values(options: SpeechOptions) -> None:
    for name, text in (("prompt", options.prompt), ("language", options.language or "")):
        if not isinstance(text, str) or any("\ud800" <= each <= "\udfff" for each in text):
            raise RequestError("must be a text of Unicode characters", path=(name,))
    if options.task not in get_args(Task):
        raise RequestError(f"must be {join_words(get_args(Task))}", path=("task",))
    if not isinstance(options.temperature, int | float | None):
        raise RequestError(f"must be a number, not {options.temperature!r}", path=("temperature",))
