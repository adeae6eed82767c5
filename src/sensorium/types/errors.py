"""The exceptions of Sensorium, sorted by who has to act: the caller, or us (server and developers).

SensoriumError
├── RequestError     the caller: the request can't be served as it is (HTTP 4xx)
│   ├── MediaFetchError    the caller or its host: the media can't be fetched (HTTP 422)
│   ├── MissingMediaError  the caller: media that was left out is in no cache (HTTP 409)
│   ├── UnknownFieldError  the caller: the request has a field that does not exist (HTTP 400)
│   ├── FailedRequestError us: a step of the engine, or the work on an item, failed (HTTP 500)
│   └── ModelError   the caller: the model can't be run by this engine, and why
├── CapacityError    no fault: there is no room right now, trying again helps (HTTP 429 / 503)
│   ├── EngineLostError    us: the engine ended while it had the request (HTTP 503)
│   ├── EncoderLostError   us: the remote encoder can't be reached (HTTP 503)
│   └── StoppingError      us: the server is stopping (HTTP 503)
└── InvariantError   us: a bug

A `RequestError` carries the path of the field that is wrong. Code that checks one field raises
without a path, or with the steps from that field down; code that descends into a field wraps the
call with `at`, which puts the field's own steps in front. So the path is separate from the message,
and no code has to parse a message for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

_Given = TypeVar("_Given")
_Read = TypeVar("_Read")
# Steps from a request down to a field: names of fields, and indices in lists.
FieldPath = tuple[str | int, ...]
_MAX_PATH_LENGTH = 200  # steps may come from a client, and be of any length
_MAX_STEPS = 64
_MAX_MESSAGE_LENGTH = 10_000


class SensoriumError(Exception):
    """The base class of all errors that Sensorium raises on purpose."""


class RequestError(SensoriumError):
    """An error that is raised when a request can't be served as it is.

    `path` leads to the field that is wrong, such as `("messages", 0, "role")`. All subclasses can
    be copied and pickled. If several callers wait for the same error, each must raise a copy,
    because raising adds to the traceback, and `at` adds to the path.
    """

    # The outputs of all prompts in the failed call of `LLM.generate`, so that those of the prompts
    # without an error are not lost.
    outputs: tuple[object, ...] = ()

    def __init__(self, message: str, path: Iterable[str | int] = ()) -> None:
        super().__init__(message)
        self.path: FieldPath = tuple(path)

    @property
    def message(self) -> str:
        """The text of the error without the path of the field."""
        return str(self.args[0])

    def __str__(self) -> str:
        return describe(self.message, self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[RequestError], args: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)  # not by the constructors, which have different parameters
    error.__dict__.update(attributes)
    return error


class at:  # noqa: N801 - reads as a word: `with at("messages", 0):`
    """A context manager that puts `steps` in front of the path of a `RequestError`."""

    __slots__ = ("_steps",)

    def __init__(self, *steps: str | int) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, RequestError):
            error.path = (*self._steps, *error.path)


def map_at(read: Callable[[_Given], _Read], entries: Iterable[_Given]) -> list[_Read]:
    """Return `read(entry)` for each entry; a `RequestError` gets the entry's index in its path."""
    results = []
    for index, entry in enumerate(entries):
        with at(index):
            results.append(read(entry))
    return results


def format_path(path: Iterable[str | int]) -> str:
    """Return the path of a field as text, such as `messages[0].content[1].image_url`."""
    most = _MAX_PATH_LENGTH  # also the limit for each step, because a client may choose its length
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:most]}" for step in path)
    return text.removeprefix(".")[:_MAX_PATH_LENGTH]


def describe(message: str, path: FieldPath) -> str:
    """Return an error message with the path of the field in front, if there is a path."""
    return f"{format_path(path)}: {message}" if path else message


class MediaFetchError(RequestError):
    """An error that is raised when media can't or may not be fetched from its address."""


class MissingMediaError(RequestError):
    """An error that is raised when media that the client did not send is in no cache."""

    def __init__(
        self, message: str, missing: tuple[str, ...] = (), path: Iterable[str | int] = ()
    ) -> None:
        super().__init__(message, path)
        self.missing = missing  # the uuids or hashes, as the client wrote them


class UnknownFieldError(RequestError):
    """An error that is raised when a field is unknown, where only known ones are allowed."""

    def __init__(
        self, message: str = "is an unknown field", path: Iterable[str | int] = ()
    ) -> None:
        super().__init__(message, path)


class FailedRequestError(RequestError):
    """An error that is raised when a request fails through a fault of the server.

    A step of the engine or the processing of a media item has failed. The same request may succeed
    later.
    """


class ModelError(RequestError):
    """An error that is raised when this engine can't run a model, or not with these options."""


class CapacityError(SensoriumError):
    """An error that is raised when there is no room for a request at this moment.

    The same request may succeed later; a client should wait for `retry_after_s` seconds.
    """

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        # After how many seconds it is worth trying again.
        self.retry_after_s = retry_after_s


class EngineLostError(CapacityError):
    """An error that is raised for requests that were in the engine when its process ended.

    A new engine process is being started, so the same request may succeed later.
    """


class EncoderLostError(CapacityError):
    """An error that is raised when the remote encoder can't be reached.

    The encoder may be started again, so the same request may succeed later. The engine itself is
    not lost, so another engine with the same encoder would not help.
    """


class StoppingError(CapacityError):
    """An error that is raised while the server shuts down; another server may serve the request."""


class InvariantError(SensoriumError):
    """An error that is raised when the code breaks a rule of its own, which is always a bug."""


# The classes above by name. Subclasses that other modules define later are not among them.
_KINDS: dict[str, type[SensoriumError]] = {
    kind.__name__: kind
    for base in (RequestError, CapacityError, InvariantError)
    for kind in (base, *base.__subclasses__())
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """The content of an error as plain values, which can be sent to another process."""

    kind: str = RequestError.__name__  # the name of its class, or of the nearest known base
    message: str
    path: FieldPath = ()
    missing: tuple[str, ...] = ()  # of a `MissingMediaError`
    retry_after_s: int = 1  # of a `CapacityError`

    def make_error(self) -> SensoriumError:
        """Return an error of the class that `kind` names, for the caller to raise."""
        error = _KINDS.get(self.kind, RequestError)(self.message)
        if isinstance(error, RequestError):
            error.path = self.path
        if isinstance(error, MissingMediaError):
            error.missing = self.missing
        if isinstance(error, CapacityError):
            error.retry_after_s = self.retry_after_s
        return error


def make_record(error: SensoriumError) -> ErrorRecord:
    """Return the content of an error, but not its traceback, as plain values.

    Texts are shortened and made valid Unicode, so that the record can always be encoded.
    """
    known = (base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS)
    kind = next(known, InvariantError.__name__)
    if isinstance(error, CapacityError):
        seconds = _as_seconds(error.retry_after_s)
        return ErrorRecord(kind=kind, message=_as_text(error), retry_after_s=seconds)
    if isinstance(error, RequestError):
        missing = error.missing if isinstance(error, MissingMediaError) else ()
        return ErrorRecord(
            kind=kind,
            message=_as_text(error.message),
            path=tuple(
                step if isinstance(step, int) else _as_text(step, _MAX_PATH_LENGTH)
                for step in error.path[:_MAX_STEPS]
            ),
            missing=tuple(map(_as_text, missing)),
        )
    return ErrorRecord(kind=kind, message=_as_text(error))


def _as_text(value: object, most: int = _MAX_MESSAGE_LENGTH) -> str:
    return str(value)[:most].encode(errors="replace").decode()


def _as_seconds(value: object) -> int:
    """Return a time in whole seconds, rounded up, or 1 if the value is no finite number."""
    try:
        return math.ceil(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return 1
