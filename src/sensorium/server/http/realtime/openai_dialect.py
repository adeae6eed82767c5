"""OpenAI's protocol for realtime transcription sessions: the final version, not the beta.

The messages are those that the package `openai` has types for (`openai.types.realtime`). Unknown
fields are refused by name, and so are fields that ask for something that this server does not do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from sensorium.server.http.calls import check_model
from sensorium.server.http.errors import ApiError
from sensorium.server.http.realtime.dialects import (
    Clear,
    Command,
    Commit,
    Configure,
    Message,
    WrittenEvent,
    check_fields,
    make_id,
    make_unknown_error,
    read_audio,
)
from sensorium.speech.formats import make_logprobs, make_token_usage
from sensorium.speech.live.audio import AudioFormat, Encoding
from sensorium.speech.live.session import (
    DELAYS_MS,
    Cleared,
    Committed,
    Completed,
    Flushed,
    LiveOptions,
    LiveSource,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    TurnDetection,
)
from sensorium.types.checking import check
from sensorium.types.errors import RequestError, at
from sensorium.types.options import join_words

_LOGPROBS = "item.input_audio_transcription.logprobs"
_ITEM = "conversation.item"
_TRANSCRIPTION = f"{_ITEM}.input_audio_transcription"
_BUFFER = "input_audio_buffer"
_SERVER_VAD = "server_vad"
_RATES = (16_000, 24_000)
_DEFAULT_FORMAT = AudioFormat("pcm16", 24_000)
_G711: dict[str, Encoding] = {"audio/pcmu": "mulaw", "audio/pcma": "alaw"}
_G711_RATE = 8_000
_VLLM_FIELDS = ("model", "final")  # of messages
_MAX_TEXT = 16_384  # characters of a prompt
_Share = Annotated[float, Meta(ge=0.0, le=1.0)]
_Time = Annotated[int, Meta(ge=0, le=30_000)]


class _Format(Struct, forbid_unknown_fields=True):
    type: str = "audio/pcm"
    rate: int | None = None


class _Transcription(Struct, forbid_unknown_fields=True):
    model: str | UnsetType | None = UNSET
    language: str | UnsetType | None = UNSET
    prompt: Annotated[str, Meta(max_length=_MAX_TEXT)] | UnsetType | None = UNSET
    delay: str | int | UnsetType | None = UNSET
    keywords: Any = None
    languages: Any = None


class _TurnDetection(Struct, forbid_unknown_fields=True):
    type: str
    threshold: _Share | None = None
    prefix_padding_ms: _Time | None = None
    silence_duration_ms: _Time | None = None
    idle_timeout_ms: Any = None
    eagerness: Any = None  # of semantic_vad
    # Accepted without effect: there are no responses in a transcription session.
    create_response: bool | None = None
    interrupt_response: bool | None = None


class _Input(Struct, forbid_unknown_fields=True):
    format: _Format | UnsetType | None = UNSET
    transcription: _Transcription | UnsetType | None = UNSET
    turn_detection: _TurnDetection | UnsetType | None = UNSET
    noise_reduction: Any = None


class _Audio(Struct, forbid_unknown_fields=True):
    input: _Input = msgspec.field(default_factory=_Input)
    output: Any = None


class _SessionType(Struct):
    type: str


class _Session(Struct, forbid_unknown_fields=True):
    type: str
    audio: _Audio | None = None
    include: list[str] | UnsetType | None = UNSET


class OpenAIDialect:
    """OpenAI's dialect for one connection. `model` is the served model's name in messages."""

    name = "openai"

    def __init__(
        self,
        *,
        source: LiveSource,
        model: str,
        model_names: Sequence[str],
        expires_at: int | None,
    ) -> None:
        self._source = source
        self._model = model
        self._model_names = model_names
        self._expires_at = expires_at  # in seconds since 1970
        self.session_id = make_id("sess")
        self.audio_format = _DEFAULT_FORMAT
        self.options = LiveOptions()

    def greet(self) -> list[Message]:
        return [_make("session.created", session=self._describe())]

    def read(self, message: Mapping[str, Any]) -> Command:
        kind = message["type"]
        if kind == f"{_BUFFER}.append":
            return read_audio(message)
        if kind == f"{_BUFFER}.commit":
            _check_fields(message)
            return Commit()
        if kind == f"{_BUFFER}.clear":
            _check_fields(message)
            return Clear()
        if kind == "session.update":
            _check_fields(message, "session")
            with at("session"):
                self._update(message.get("session"))
            return Configure()
        if kind == "transcription_session.update":
            raise ApiError(
                "transcription_session.update belongs to the beta of this API. Send "
                'session.update with session.type "transcription" instead.',
                param="type",
                code="unknown_event",
            )
        raise make_unknown_error(kind)

    def confirm(self, command: Command) -> list[Message]:
        is_update = isinstance(command, Configure)
        return [_make("session.updated", session=self._describe())] if is_update else []

    def write(self, event: WrittenEvent) -> list[Message]:
        match event:
            case SpeechStarted(item_id, start_ms):
                kind = f"{_BUFFER}.speech_started"
                return [_make(kind, audio_start_ms=start_ms, item_id=item_id)]
            case SpeechStopped(item_id, end_ms):
                return [_make(f"{_BUFFER}.speech_stopped", audio_end_ms=end_ms, item_id=item_id)]
            case Committed():
                return _write_committed(event)
            case TextDelta(item_id, text, scores):
                more = {"logprobs": make_logprobs(scores)} if self.options.needs_logprobs else {}
                return [_make_item(f"{_TRANSCRIPTION}.delta", item_id, delta=text, **more)]
            case Completed():
                return [self._write_completed(event)]
            case Cleared():
                return [_make(f"{_BUFFER}.cleared")]
            case Flushed():
                return []

    def write_failure(self, item_id: str, error: ApiError) -> Message:
        return _make_item(f"{_TRANSCRIPTION}.failed", item_id, error=error.make_object())

    def write_error(self, error: ApiError, event_id: str | None) -> Message:
        return _make("error", error={**error.make_object(), "event_id": event_id})

    def _write_completed(self, event: Completed) -> Message:
        usage = msgspec.to_builtins(make_token_usage(event.transcript.usage))
        message = _make_item(
            f"{_TRANSCRIPTION}.completed",
            event.item_id,
            transcript=event.transcript.text.strip(),
            usage={**usage, "seconds": round(event.audio_s, 3)},
        )
        if self.options.needs_logprobs:
            segments = event.transcript.segments
            scores = (score for segment in segments for score in segment.scores)
            message["logprobs"] = make_logprobs(scores)
        return message

    def _update(self, given: Any) -> None:
        """Apply the given fields to the session; if one of them is wrong, nothing is changed."""
        # The type is checked first: sessions of other types have fields that are unknown here.
        if check(given, _SessionType).type != "transcription":
            raise RequestError(
                "must be transcription: this server transcribes what is said, and gives no answers",
                path=("type",),
            )
        session = check(given, _Session)
        options, audio_format = self.options, self.audio_format
        if session.include is not UNSET:
            options = replace(options, needs_logprobs=_read_include(session.include or ()))
        if session.audio is not None:
            with at("audio"):
                _refuse(session.audio, "output")
                with at("input"):
                    audio_format = _read_format(session.audio.input.format, audio_format)
                    options = self._read_input(session.audio.input, options)
        self.options, self.audio_format = options, audio_format

    def _read_input(self, given: _Input, options: LiveOptions) -> LiveOptions:
        _refuse(given, "noise_reduction")
        if given.turn_detection is not UNSET:
            with at("turn_detection"):
                options = replace(options, turn_detection=_read_detection(given.turn_detection))
        chosen = given.transcription
        if chosen is None:
            return replace(options, language=None, prompt="", delay_ms=None)
        if chosen is UNSET:
            return options
        with at("transcription"):
            _refuse(chosen, "keywords", "languages")
            if chosen.model is not UNSET:
                self._check_model(chosen.model)
            if chosen.language is not UNSET:
                options = replace(options, language=chosen.language or None)
            if chosen.prompt is not UNSET:
                options = replace(options, prompt=chosen.prompt or "")
            if chosen.delay is not UNSET:
                options = replace(options, delay_ms=_read_delay(chosen.delay))
            self._source.check(options)
        return options

    def _check_model(self, model: str | None) -> None:
        try:
            check_model(model, self._model_names)
        except ApiError as error:
            error.param = "session.audio.input.transcription.model"
            raise

    def _describe(self) -> Message:
        """Return the session's configuration as the client sees it."""
        options, detection = self.options, self.options.turn_detection
        shown = None
        if detection is not None:
            shown = {"type": _SERVER_VAD, **asdict(detection)}
        return {
            "type": "transcription",
            "object": "realtime.transcription_session",
            "id": self.session_id,
            "expires_at": self._expires_at,
            "audio": {
                "input": {
                    "format": _write_format(self.audio_format),
                    "noise_reduction": None,
                    "transcription": {
                        "model": self._model,
                        "language": options.language,
                        "prompt": options.prompt or None,
                        "delay": _write_delay(options.delay_ms),
                    },
                    "turn_detection": shown,
                }
            },
            "include": [_LOGPROBS] if options.needs_logprobs else None,
        }


def _check_fields(message: Mapping[str, Any], *names: str) -> None:
    """Raise a `RequestError` if a message has fields besides `names` and the common ones."""
    for name in _VLLM_FIELDS:
        if name in message:
            raise RequestError(
                "belongs to vLLM's dialect, and this connection has OpenAI's: add ?dialect=vllm to "
                "the address, or leave it out",
                path=(name,),
            )
    check_fields(message, *names)


def _refuse(given: Struct, *names: str) -> None:
    """Raise a `RequestError` if one of these fields is given, which the server does not support."""
    for name in names:
        if getattr(given, name) is not None:
            raise RequestError("is not supported by this server: leave it out", path=(name,))


def _read_delay(given: str | int | None) -> int | None:
    """Return a delay in milliseconds, from one of OpenAI's words, milliseconds or `None`."""
    if given is None or isinstance(given, int):
        return given
    if given not in DELAYS_MS:
        words = join_words(tuple(DELAYS_MS))
        raise RequestError(f"must be {words}, or a number of milliseconds", path=("delay",))
    return DELAYS_MS[given]


def _write_delay(delay_ms: int | None) -> str | int | None:
    return next((word for word, each in DELAYS_MS.items() if each == delay_ms), delay_ms)


def _read_include(given: Sequence[str]) -> bool:
    for index, each in enumerate(given):
        if each != _LOGPROBS:
            raise RequestError(f"must be {_LOGPROBS}", path=("include", index))
    return bool(given)


def _read_format(given: _Format | UnsetType | None, now: AudioFormat) -> AudioFormat:
    if given is UNSET:
        return now
    if given is None:
        return _DEFAULT_FORMAT
    if given.type == "audio/pcm":
        rate = _DEFAULT_FORMAT.rate if given.rate is None else given.rate
        if rate not in _RATES:
            raise RequestError("must be 16000 or 24000", path=("format", "rate"))
        return AudioFormat("pcm16", rate)
    if given.type not in _G711:
        words = f"must be {join_words(('audio/pcm', *_G711))}"
        raise RequestError(words, path=("format", "type"))
    if given.rate not in (None, _G711_RATE):
        raise RequestError(f"must be {_G711_RATE} for {given.type}", path=("format", "rate"))
    return AudioFormat(_G711[given.type], _G711_RATE)


def _write_format(form: AudioFormat) -> Message:
    if form.encoding == "pcm16":
        return {"type": "audio/pcm", "rate": form.rate}
    return {"type": next(name for name, each in _G711.items() if each == form.encoding)}


def _read_detection(given: _TurnDetection | None) -> TurnDetection | None:
    if given is None:
        return None
    if given.type != _SERVER_VAD:
        hint = ": this server has no semantic_vad" if given.type == "semantic_vad" else ""
        raise RequestError(f"must be server_vad, or turn_detection null{hint}", path=("type",))
    _refuse(given, "idle_timeout_ms", "eagerness")
    names = ("threshold", "prefix_padding_ms", "silence_duration_ms")
    chosen = {name: getattr(given, name) for name in names}
    return TurnDetection(**{name: each for name, each in chosen.items() if each is not None})


def _write_committed(event: Committed) -> list[Message]:
    """Return the messages for a new item, which is a message of the user with audio."""
    content = [{"type": "input_audio", "transcript": None}]
    item = {
        "id": event.item_id,
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": content,
    }
    place = {"previous_item_id": event.previous_id}
    return [
        _make(f"{_BUFFER}.committed", item_id=event.item_id, **place),
        _make(f"{_ITEM}.added", item=item, **place),
        _make(f"{_ITEM}.done", item=item, **place),
    ]


def _make(kind: str, **fields: Any) -> Message:
    return {"type": kind, "event_id": make_id("event"), **fields}


def _make_item(kind: str, item_id: str, **fields: Any) -> Message:
    return _make(kind, item_id=item_id, content_index=0, **fields)
