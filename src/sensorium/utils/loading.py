"""What a process does while it loads what it will keep for as long as it lives."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[str], None]] = []


@contextmanager
def reporting_steps(listener: Callable[[str], None]) -> Iterator[None]:
    """Call `listener` with a few words before each step of loading a model in this block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def report_step(words: str) -> None:
    """Report that a step of loading begins, such as "loading the weights"."""
    for listener in _listeners:
        listener(words)


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage in this block, and later none of what is there at its end.

    Importing torch and Transformers makes so many objects that the collector looks at all of them
    again and again, for a seventh of the time; later a full collection would stop the process for
    a quarter of a second.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
