"""vLLM's protocol for realtime transcription: one text for the whole audio.

A client sends audio in PCM16 at 16 kHz, and `commit` with `final` when it ends. It gets deltas, and
then the whole text. After that, more audio may follow in the same connection. Unlike vLLM, this
server transcribes audio as it arrives, so the first `commit`, which starts the generation in vLLM,
changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

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
from sensorium.speech.languages import WITHOUT_SPACES
from sensorium.speech.live.audio import AudioFormat
from sensorium.speech.live.session import Completed, Flushed, LiveOptions, LiveSource, TextDelta
from sensorium.speech.transcript import SpeechUsage
from sensorium.types.errors import RequestError


class VllmDialect:
    """vLLM's dialect for one connection, in which clients can't change the options."""

    name = "vllm"
    audio_format = AudioFormat("pcm16", 16_000)

    def __init__(self, *, source: LiveSource, model_names: Sequence[str]) -> None:
        # A streaming model needs no turns: one text is for all of the audio.
        self.options = LiveOptions(turn_detection=None) if source.is_streaming else LiveOptions()
        self._model_names = model_names
        self.session_id = make_id("sess")
        self._text = ""  # of all items since the start, or since the last final commit
        self._item_id: str | None = None  # of the item that the text ends with
        self._usages: list[SpeechUsage] = []
        self._language: str | None = None  # of the last item

    def greet(self) -> list[Message]:
        created = int(time.time())
        return [{"type": "session.created", "id": self.session_id, "created": created}]

    def read(self, message: Mapping[str, Any]) -> Command:
        kind = message["type"]
        if kind == "input_audio_buffer.append":
            return read_audio(message)
        if kind == "input_audio_buffer.commit":
            check_fields(message, "final")
            is_final = message.get("final")
            if is_final not in (None, True, False):
                raise RequestError("must be true or false", path=("final",))
            return Commit(is_final=True) if is_final else Configure()
        if kind == "input_audio_buffer.clear":
            check_fields(message)
            return Clear()
        if kind == "session.update":
            self._check_update(message)
            return Configure()
        raise make_unknown_error(kind)

    def _check_update(self, message: Mapping[str, Any]) -> None:
        if "session" in message:
            raise RequestError(
                "belongs to OpenAI's dialect, and this connection has vLLM's: add "
                "?intent=transcription to the address",
                path=("session",),
            )
        check_fields(message, "model")
        model = message.get("model")
        if model is not None and not isinstance(model, str):
            raise RequestError("must be text", path=("model",))
        check_model(model, self._model_names)

    def confirm(self, _: Command) -> list[Message]:
        return []

    def write(self, event: WrittenEvent) -> list[Message]:
        if isinstance(event, TextDelta):
            is_new = event.item_id != self._item_id
            has_space = is_new and self._text and self._language not in WITHOUT_SPACES
            delta = f" {event.text}" if has_space else event.text
            self._item_id = event.item_id
            self._text += delta
            return [{"type": "transcription.delta", "delta": delta}]
        if isinstance(event, Completed):
            self._usages.append(event.transcript.usage)
            self._language = event.transcript.language
        if isinstance(event, Flushed):
            return [self._finish(event)]
        return []

    def write_failure(self, item_id: str, error: ApiError) -> Message:
        return self.write_error(error, item_id)

    def write_error(self, error: ApiError, _: str | None) -> Message:
        code = error.code or ("processing_error" if error.status >= 500 else "invalid_request")
        return {"type": "error", "error": error.message, "code": code}

    def _finish(self, event: Flushed) -> Message:
        """Return the message with the whole text, and begin a new text."""
        text, usages = self._text, self._usages
        self._text, self._item_id, self._usages = "", None, []
        num_audio = sum(usage.num_audio_tokens for usage in usages)
        num_input = num_audio + sum(usage.num_text_tokens for usage in usages)
        num_output = sum(usage.num_output_tokens for usage in usages)
        usage = {
            "prompt_tokens": num_input,
            "completion_tokens": num_output,
            "total_tokens": num_input + num_output,
            "prompt_tokens_details": {"audio_tokens": num_audio},
            "seconds": round(event.audio_s, 3),
        }
        return {"type": "transcription.done", "text": text, "usage": usage}
