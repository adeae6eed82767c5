"""Turns what decoders raise on damaged files into refusals in our own words.

Messages name neither addresses nor paths nor what a library said: they go to clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sensorium.types.errors import RequestError, SensoriumError


@contextmanager
def refuse_damaged(kind: str, *decoder_errors: type[Exception]) -> Iterator[None]:
    """Raise a `RequestError` if the block fails in a way in which a decoder reports a bad file.

    `kind` is what was expected, as in "an image". Errors of any other type pass through: they are
    bugs, not damaged files, and have to reach the log and the client as such.
    """
    try:
        yield
    except SensoriumError:
        raise
    except MemoryError as error:
        raise RequestError("there is not enough memory to decode this file") from error
    except decoder_errors as error:
        raise RequestError(f"this is not {kind} that can be read: truncated or damaged") from error
