"""Work that may take minutes without a sign of life, announced before it begins.

A compiler of kernels is such work. Whatever watches this process for stalls registers a listener
once, at the start; a process that is not watched has none.
"""

from __future__ import annotations

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
