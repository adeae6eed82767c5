"""The routes `/v1/audio/transcriptions` and `/v1/audio/translations`, which transcribe speech.

A `Transcriber` does the work. This module reads the form of a request into `SpeechOptions`, and
sends the transcript in the format that was asked for, whole or as a stream of its parts.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from sensorium.server.http.bodies.reading import make_response, read_request
from sensorium.server.http.bodies.uploads import FormFields, read_form
from sensorium.server.http.calls import Context, Transcriber, check_model, is_refused
from sensorium.server.http.connections import run_until_disconnect
from sensorium.server.http.errors import ApiError, WirePaths
from sensorium.server.http.openai.params import make_unsupported
from sensorium.server.http.protocol.speech import (
    FILE_FIELD,
    SPEECH_SAMPLING,
    SpeechRequest,
    TranscriptEvent,
    TranscriptionRequest,
    TranslationRequest,
    read_form_fields,
)
from sensorium.server.http.streaming import EventStream, make_event
from sensorium.server.metrics.clock import RequestClock
from sensorium.speech.formats import (
    SPEECH_FORMATS,
    SpeechFormat,
    SpeechLogprob,
    TextDeltas,
    as_json,
    as_plain,
    as_verbose,
    make_logprobs,
)
from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, Task, Transcript
from sensorium.types.errors import InvariantError, RequestError
from sensorium.types.options import join_words
from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams

logger = logging.getLogger(__name__)
_STREAMED: tuple[SpeechFormat, ...] = ("json", "text")
_SUBTITLES: tuple[SpeechFormat, ...] = ("srt", "vtt")
_GRANULARITIES = ("segment", "word")
_LOGPROBS = "logprobs"
_PATHS = WirePaths(input=(FILE_FIELD,), prompt=("prompt",), media={"audio": [(FILE_FIELD,)]})


async def create_transcription(http_request: Request, context: Context) -> Response:
    return await _answer(http_request, context, TranscriptionRequest, "transcribe")


async def create_translation(http_request: Request, context: Context) -> Response:
    return await _answer(http_request, context, TranslationRequest, "translate")


async def _answer(
    http_request: Request, context: Context, kind: type[SpeechRequest], task: Task
) -> Response:
    transcriber = get_transcriber(context, task)

    def parse(fields: FormFields) -> tuple[_Work, str | None]:
        request, warning = read_request(kind, read_form_fields(kind, fields))
        check_model(request.model, context.options.model_names)
        return _prepare(request, transcriber, task), warning

    (work, warning), media = await read_form(
        http_request, parse, intake=context.uploads, file_field=FILE_FIELD
    )
    if warning is not None:
        http_request.state.warning = warning
        logger.warning("request %s: %s", http_request.state.request_id, warning)
    http_request.state.paths = _PATHS
    clock = context.metrics.start_request(
        arrived=http_request.state.arrived, params=work.options.sampling
    )
    clock.mark("parse")
    run = _Run(transcriber=transcriber, work=work, media=media, clock=clock)
    if work.is_stream:
        return EventStream(run.stream(), context.failures)
    transcript = await run_until_disconnect(http_request.receive, run.finish())
    return _make_response(transcript, work)


def get_transcriber(context: Context, task: Task) -> Transcriber:
    """Return the transcriber, or raise an `ApiError` that names the right route for this task."""
    transcriber = context.transcriber
    if transcriber is None or "transcription" not in context.tasks:
        has_audio = "audio" in context.engine.modalities
        where = " Send audio as `input_audio` in messages to" if has_audio else " Use"
        hint = f"{where} /v1/chat/completions." if "chat" in context.tasks else ""
        raise _make_route_error(f"This model does not transcribe audio.{hint}")
    if task == "translate" and "translation" not in context.tasks:
        raise _make_route_error(
            "This model does not translate what is said. Use /v1/audio/transcriptions, which "
            "transcribes it in its own language."
        )
    return transcriber


def _make_route_error(message: str) -> ApiError:
    return ApiError(message, param="model", code="unsupported_route")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A checked request: how to transcribe a recording, and how to send the transcript."""

    options: SpeechOptions
    format: SpeechFormat
    is_stream: bool
    cache_salt: str | None


def _prepare(request: SpeechRequest, transcriber: Transcriber, task: Task) -> _Work:
    """Return the work that a request asks for; raise an error if it is unsupported or not valid."""
    for name in request.unsupported:
        if getattr(request, name) is not None:
            raise make_unsupported(name)
    form = _read_format(request)
    granularities: tuple[str, ...] = ()
    has_logprobs = False
    if isinstance(request, TranscriptionRequest):
        if request.chunking_strategy not in (None, "auto"):
            raise make_unsupported("chunking_strategy", "other than auto")
        granularities = _read_granularities(request, form)
        has_logprobs = _read_include(request, form)
    elif form == "verbose_json":
        granularities = ("segment",)
    needs_segments = form in _SUBTITLES or "segment" in granularities
    if needs_segments and not transcriber.has_segments:
        raise RequestError(
            f"{form} needs the times of segments, which this model does not give: use json or text",
            path=("response_format",),
        )
    if "word" in granularities and not transcriber.has_words:
        raise RequestError(
            "word needs the times of words, which this model does not give",
            path=("timestamp_granularities",),
        )
    given = {name: getattr(request, name) for name in SPEECH_SAMPLING if name != "temperature"}
    options = SpeechOptions(
        task=task,
        language=request.language,
        prompt=request.prompt or "",
        temperature=request.temperature,
        carries_text=request.condition_on_previous_text,
        needs_segments=needs_segments,
        needs_words="word" in granularities,
        needs_logprobs=has_logprobs,
        sampling=SamplingParams(**{name: each for name, each in given.items() if each is not None}),
    )
    return _Work(
        options=options, format=form, is_stream=bool(request.stream), cache_salt=request.cache_salt
    )


def _read_format(request: SpeechRequest) -> SpeechFormat:
    form = request.response_format or "json"
    if form == "diarized_json":
        raise make_unsupported("response_format", form)
    if form not in SPEECH_FORMATS:
        raise RequestError(
            f"must be {join_words(SPEECH_FORMATS)}, not {form[:50]!r}", path=("response_format",)
        )
    if request.stream and form not in _STREAMED:
        raise RequestError(
            f"{form} can't be streamed: use {join_words(_STREAMED)}, or set stream to false",
            path=("response_format",),
        )
    return form


def _read_granularities(request: TranscriptionRequest, form: SpeechFormat) -> tuple[str, ...]:
    path = "timestamp_granularities"
    given = request.timestamp_granularities
    if form != "verbose_json":
        if given:
            raise RequestError("needs response_format to be verbose_json", path=(path,))
        return ()
    for index, each in enumerate(given or ()):
        if each not in _GRANULARITIES:
            words = join_words(_GRANULARITIES)
            raise RequestError(f"must be {words}, not {each[:50]!r}", path=(path, index))
    return tuple(given or ("segment",))


def _read_include(request: TranscriptionRequest, form: SpeechFormat) -> bool:
    for index, each in enumerate(request.include or ()):
        if each != _LOGPROBS:
            raise RequestError(f"must be {_LOGPROBS}, not {each[:50]!r}", path=("include", index))
    if request.include and form != "json":
        raise RequestError("needs response_format to be json", path=("include",))
    return bool(request.include)


@dataclass(slots=True, kw_only=True)
class _Run:
    """One transcription for one client's request, measured by a clock."""

    transcriber: Transcriber
    work: _Work
    media: bytes
    clock: RequestClock
    texts: TextDeltas = field(default_factory=TextDeltas, init=False)  # of the stream

    async def finish(self) -> Transcript:
        async with aclosing(self._run()) as parts:
            async for part in parts:
                if isinstance(part, Transcript):
                    return part
        raise InvariantError("a transcription ended without its transcript")

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events: a delta for each segment, and the whole text at the end.

        The deltas add up to the whole text: text that no segment had is sent as a last delta.
        """
        async with aclosing(self._run()) as parts:
            async for part in parts:
                for event in self._make_events(part):
                    yield make_event(event)
                if isinstance(part, Transcript):
                    return
        raise InvariantError("a transcription ended without its transcript")

    async def _run(self) -> AsyncGenerator[Segment | Transcript, None]:
        """Yield the parts of the transcript, and count how it ends."""
        end: FinishReason | None = FinishReason.ABORT  # the reason if the loop is left early
        try:
            async with aclosing(self._start()) as parts:
                async for part in parts:
                    self.clock.on_segment()
                    if isinstance(part, Transcript):
                        self.clock.on_transcript(part.usage)
                    yield part
        except Exception as error:
            end = None if is_refused(error) else FinishReason.ERROR
            raise
        finally:
            if end is not None:
                self.clock.on_end(end)

    def _start(self) -> AsyncGenerator[Segment | Transcript, None]:
        return self.transcriber.transcribe(
            self.media,
            self.work.options,
            request_id=f"{self.work.options.task}-{uuid.uuid4().hex}",
            cache_salt=self.work.cache_salt,
        )

    def _make_events(self, part: Segment | Transcript) -> list[TranscriptEvent]:
        if isinstance(part, Segment):
            return _make_delta(self.texts.add(part.text), self._get_logprobs(part))
        answer = as_json(part, has_logprobs=self.work.options.needs_logprobs)
        done = TranscriptEvent(
            type="transcript.text.done",
            text=answer.text,
            logprobs=answer.logprobs,
            usage=answer.usage,
        )
        # The log-probabilities of the rest are those of the transcript if no segment came before.
        logprobs = UNSET if self.texts.sent else answer.logprobs
        return [*_make_delta(self.texts.finish(answer.text), logprobs), done]

    def _get_logprobs(self, segment: Segment) -> list[SpeechLogprob] | UnsetType:
        return make_logprobs(segment.scores) if self.work.options.needs_logprobs else UNSET


def _make_delta(text: str, logprobs: list[SpeechLogprob] | UnsetType) -> list[TranscriptEvent]:
    delta = TranscriptEvent(type="transcript.text.delta", delta=text, logprobs=logprobs)
    return [delta] if text else []


def _make_response(transcript: Transcript, work: _Work) -> Response:
    options = work.options
    answer: Any
    if work.format == "json":
        answer = as_json(transcript, has_logprobs=options.needs_logprobs)
    elif work.format == "verbose_json":
        answer = as_verbose(
            transcript, has_segments=options.needs_segments, has_words=options.needs_words
        )
    else:
        return PlainTextResponse(as_plain(transcript, work.format))
    return make_response(answer)
