"""The interface of the two dialects (wire formats) of `/v1/realtime`, and what both need.

A dialect reads the messages of a client as commands, and writes the events of a live session as
messages. It keeps what its wire format needs: the options that the client has set, and ids. It does
no I/O.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import pybase64

from sensorium.server.http.errors import ApiError
from sensorium.speech.live.audio import AudioFormat
from sensorium.speech.live.session import (
    Cleared,
    Committed,
    Completed,
    Flushed,
    LiveOptions,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
)
from sensorium.types.errors import RequestError, UnknownFieldError

_COMMON_FIELDS = ("type", "event_id")  # of every message
_MAX_ID_LENGTH = 512  # of an event, as the client has named it


@dataclass(frozen=True, slots=True)
class Append:
    """A command that adds raw audio in the session's format."""

    audio: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """A command that ends an item or, if it is final, the whole audio."""

    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Clear:
    """A command that drops the audio that was not committed."""


@dataclass(frozen=True, slots=True)
class Configure:
    """A command that applies the format and the options that the dialect now has."""


Command = Append | Commit | Clear | Configure
Message = dict[str, Any]
# The events that `Dialect.write` takes. `Failed` is for `write_failure`, with the client's error.
WrittenEvent = SpeechStarted | SpeechStopped | Committed | TextDelta | Completed | Cleared | Flushed


class Dialect(Protocol):
    """A wire format of the route, with the state of one connection."""

    @property
    def name(self) -> str: ...  # the value of `dialect` in the address

    @property
    def session_id(self) -> str: ...  # the client gets it with the first message

    @property
    def audio_format(self) -> AudioFormat: ...

    @property
    def options(self) -> LiveOptions: ...

    def greet(self) -> list[Message]:
        """Return the messages that a client gets before it has sent anything."""
        ...

    def read(self, message: Mapping[str, Any]) -> Command:
        """Return the command in a message, or raise an `ApiError` or a `RequestError`."""
        ...

    def confirm(self, command: Command) -> list[Message]:
        """Return the messages to send after a command was carried out."""
        ...

    def write(self, event: WrittenEvent) -> list[Message]: ...

    def write_failure(self, item_id: str, error: ApiError) -> Message: ...

    def write_error(self, error: ApiError, event_id: str | None) -> Message:
        """Return the message for an error. `event_id` is that of the client's message, if any."""
        ...


def decode_message(text: str) -> dict[str, Any]:
    """Return a message of a client as a dictionary. Raise an `ApiError` if it is no JSON object."""
    try:
        message = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(f"The message is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(message, dict):
        raise ApiError("The message must be a JSON object.", code="invalid_json")
    if not isinstance(message.get("type"), str):
        raise ApiError("The message needs a type, which is text.", param="type")
    return message


def get_event_id(message: Mapping[str, Any]) -> str | None:
    """Return the id that a client has given to its message, or `None` if it has none."""
    event_id = message.get("event_id")
    return event_id[:_MAX_ID_LENGTH] if isinstance(event_id, str) else None


def check_fields(message: Mapping[str, Any], *names: str) -> None:
    """Raise an `UnknownFieldError` if a message has fields besides `names` and the common ones."""
    for name in message:
        if name not in _COMMON_FIELDS and name not in names:
            raise UnknownFieldError(path=(name,))


def read_audio(message: Mapping[str, Any]) -> Append:
    """Return the audio of a client's message. Raise a `RequestError` if it is no base64."""
    check_fields(message, "audio")
    audio = message.get("audio")
    if not isinstance(audio, str):
        raise RequestError("must be text: audio in base64", path=("audio",))
    try:
        return Append(pybase64.b64decode(audio, validate=True))
    except ValueError as error:
        raise RequestError("must be valid base64", path=("audio",)) from error


def make_unknown_error(kind: str) -> ApiError:
    """Return the error for a message with a type that the dialect does not have."""
    return ApiError(
        f"There is no message of the type {kind[:100]!r} here. This server only transcribes: it "
        "takes session.update and input_audio_buffer.append, .commit and .clear.",
        param="type",
        code="unknown_event",
    )


def make_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"
