"""The parts of a process's life that others have to allow for: loading, and work without progress.

A compiler of kernels may take minutes without a sign of progress. Such work is announced before it
begins. The code that watches a process for stalls registers a listener once, at the start; a
process that is not watched has none.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[bool], None]] = []


def listen_for_long_work(listener: Callable[[bool], None]) -> None:
    """Call `listener` with True before each piece of long work, and with False after it."""
    _listeners.append(listener)


@contextmanager
def long_work() -> Iterator[None]:
    """Announce that the block may take minutes. It must not be nested."""
    for listener in _listeners:
        listener(True)
    try:
        yield
    finally:
        for listener in _listeners:
            listener(False)


@contextmanager
def without_collection() -> Iterator[None]:
    """Load long-lived objects without garbage collection, and exempt them from it for ever.

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
