"""Turns what decoders raise on damaged files into refusals in our own words.

Messages name neither addresses nor paths nor what a library said: they go to clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sensorium.types.errors import RequestError, SensoriumError


@contextmanager
def refuse_damaged(kind: str) -> Iterator[None]:
    """`kind` is what was expected, as in "an image"."""
    try:
        yield
    except SensoriumError:
        raise
    except MemoryError as error:
        raise RequestError("there is not enough memory to decode this file") from error
    except Exception as error:  # decoders raise anything: struct.error, SyntaxError, OSError, ...
        raise RequestError(f"this is not {kind} that can be read: truncated or damaged") from error
