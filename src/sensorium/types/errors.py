"""Errors by fault: who has to change something so that it doesn't happen again.

SensoriumError
├── RequestError     the caller: the request can't be served as it is (HTTP 4xx)
│   ├── MediaFetchError    the caller or its host: the media can't be had (HTTP 422)
│   ├── MissingMediaError  the caller: media said to be cached is not (HTTP 409)
│   ├── FailedRequestError us: a step of the engine, or the work on an item, failed (HTTP 500)
│   └── ModelError   the caller: the model can't be run by this engine, and why
├── CapacityError    nobody: no room right now, worth trying again (HTTP 429 / 503)
│   └── EngineLostError    us: the engine ended while it had the request (HTTP 503)
└── InvariantError   us: a bug; loud
"""


class SensoriumError(Exception):
    """Base of every error that Sensorium raises on purpose."""


class RequestError(SensoriumError):
    """The request can't be served as it is; the message names what is wrong.

    `LLM.generate` attaches the outputs of the whole call as `outputs`, so that neighbours of a bad
    request are not lost.
    """

    outputs: tuple[object, ...] = ()


class MediaFetchError(RequestError):
    """The media behind an address could not be fetched, or may not be."""


class MissingMediaError(RequestError):
    """Media that the client itself left out (a uuid or a hash alone) is not in any cache."""

    def __init__(self, message: str, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class FailedRequestError(RequestError):
    """A step of the engine or the work on an item failed, and the request with it, by our fault;
    the same request may succeed later.
    """


def add_label(error: RequestError, label: str | None) -> RequestError:
    """Another error of the same kind and with all that it knows, said of `label`."""
    kind = type(error)
    labelled = kind.__new__(kind)  # kinds differ in what they are made from
    labelled.__dict__.update(error.__dict__)
    labelled.args = (f"{error}" if label is None else f"{label}: {error}",)
    return labelled


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


class InvariantError(SensoriumError):
    """A rule of our own was broken. Always a bug of Sensorium."""
