"""Errors by fault: who has to change something so that it doesn't happen again.

SensoriumError
├── RequestError     the caller: the request can't be served as it is (HTTP 4xx)
│   ├── MediaFetchError    the caller or its host: the media can't be had (HTTP 422)
│   ├── MissingMediaError  the caller: media that was left out is in no cache (HTTP 409)
│   ├── FailedRequestError us: a step of the engine, or the work on an item, failed (HTTP 500)
│   └── ModelError   the caller: the model can't be run by this engine, and why
├── CapacityError    no fault: there is no room right now, trying again helps (HTTP 429 / 503)
│   ├── EngineLostError    us: the engine ended while it had the request (HTTP 503)
│   └── StoppingError      us: the server is stopping (HTTP 503)
└── InvariantError   us: a bug; loud

A `RequestError` carries the path of the field that is wrong. Code that looks at one field raises
without a path, or with the steps below that field; code that goes down into a field wraps the call
with `at`, which puts the field's own steps before them. So words and places never mix, and no
reader has to find a place in a text.
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
    """Base of every error that Sensorium raises on purpose."""


class RequestError(SensoriumError):
    """The request can't be served as it is.

    It can be copied and pickled, whatever its subclass is made from. An error that several callers
    wait for must be copied for each, since a traceback and a path grow on the way up.
    """

    # The outputs of the whole call of `LLM.generate`, so that neighbours are not lost.
    outputs: tuple[object, ...] = ()

    def __init__(self, message: str, path: Iterable[str | int] = ()) -> None:
        super().__init__(message)
        self.path: FieldPath = tuple(path)

    @property
    def message(self) -> str:
        """What is wrong, without the place."""
        return str(self.args[0])

    def __str__(self) -> str:
        return describe(self.message, self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[RequestError], args: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    """Make an error again without its constructor: subclasses differ in their arguments."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class at:  # noqa: N801 - reads as a word: `with at("messages", 0):`
    """A context that puts steps before the path of a `RequestError` that leaves it."""

    __slots__ = ("_steps",)

    def __init__(self, *steps: str | int) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, RequestError):
            error.path = (*self._steps, *error.path)


def map_at(read: Callable[[_Given], _Read], entries: Iterable[_Given]) -> list[_Read]:
    """Return what `read` makes of each entry; its errors get the index of the entry."""
    results = []
    for index, entry in enumerate(entries):
        with at(index):
            results.append(read(entry))
    return results


def format_path(path: Iterable[str | int]) -> str:
    """Return a path as it is written for people: `messages[0].content[1].image_url`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")[:_MAX_PATH_LENGTH]


def describe(message: str, path: FieldPath) -> str:
    """Return a message with the place that it is about, if there is one."""
    return f"{format_path(path)}: {message}" if path else message


class MediaFetchError(RequestError):
    """The media behind an address could not be fetched, or may not be."""


class MissingMediaError(RequestError):
    """Media that the client itself left out (a uuid or a hash alone) is not in any cache."""

    def __init__(
        self, message: str, missing: tuple[str, ...] = (), path: Iterable[str | int] = ()
    ) -> None:
        super().__init__(message, path)
        self.missing = missing  # the uuids or hashes, as the client wrote them


class FailedRequestError(RequestError):
    """A step of the engine or the work on an item failed, and the request with it, by our fault.

    The same request may succeed later.
    """


class ModelError(RequestError):
    """The model or its configuration can't be run, with the reason."""


class CapacityError(SensoriumError):
    """There is no room at this moment; the same request may succeed later."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        # After how many seconds it is worth trying again.
        self.retry_after_s = retry_after_s


class EngineLostError(CapacityError):
    """The engine's process has ended; another one is being started."""


class StoppingError(CapacityError):
    """The server is stopping; another one may serve the same request."""


class InvariantError(SensoriumError):
    """A rule of our own was broken. Always a bug of Sensorium."""


# The classes above by name. Subclasses that other modules define later are not among them.
_KINDS: dict[str, type[SensoriumError]] = {
    kind.__name__: kind
    for base in (RequestError, CapacityError, InvariantError)
    for kind in (base, *base.__subclasses__())
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """An error as plain values, which can be sent to another process."""

    kind: str = RequestError.__name__  # the name of its class, or of the nearest known base
    message: str
    path: FieldPath = ()
    missing: tuple[str, ...] = ()  # of a `MissingMediaError`
    retry_after_s: int = 1  # of a `CapacityError`

    def make_error(self) -> SensoriumError:
        """Return an error of the recorded kind; the caller raises it."""
        error = _KINDS.get(self.kind, RequestError)(self.message)
        if isinstance(error, RequestError):
            error.path = self.path
        if isinstance(error, MissingMediaError):
            error.missing = self.missing
        if isinstance(error, CapacityError):
            error.retry_after_s = self.retry_after_s
        return error


def make_record(error: SensoriumError) -> ErrorRecord:
    """Return the record of an error: its kind, its text and its place, and no traceback.

    It can always be encoded: what a client or a library wrote is cut, and made valid Unicode.
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
    """Return text of bounded length, with question marks for halves of surrogate pairs."""
    return str(value)[:most].encode(errors="replace").decode()


def _as_seconds(value: object) -> int:
    """Return a time in whole seconds, or 1 if the value is no finite number."""
    try:
        return math.ceil(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return 1
