"""Reports the steps of loading a model, and long work without a sign of progress.

The steps of loading are reported for a command to show. A compiler of kernels may take minutes
without a sign of progress, so such work is announced before it begins. The code that watches this
process for stalls registers a listener once, at the start. A process that is not watched has none.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[bool], None]] = []
_step_listeners: list[Callable[[str], None]] = []


def listen_for_long_work(listener: Callable[[bool], None]) -> None:
    """Register a function to call with True before each piece of long work and False after it."""
    _listeners.append(listener)


@contextmanager
def long_work() -> Iterator[None]:
    """Announce that the `with` block may take minutes. Such blocks must not be nested."""
    for listener in _listeners:
        listener(True)
    try:
        yield
    finally:
        for listener in _listeners:
            listener(False)


@contextmanager
def reporting_steps(listener: Callable[[str], None]) -> Iterator[None]:
    """Call `listener` with the words of each step of loading a model before it begins."""
    _step_listeners.append(listener)
    try:
        yield
    finally:
        _step_listeners.remove(listener)


def report_step(words: str) -> None:
    """Report that a step of loading a model begins, such as "loading the weights"."""
    for listener in _step_listeners:
        listener(words)


@contextmanager
def without_collection() -> Iterator[None]:
    """Turn off garbage collection in the `with` block, and for good for its objects (`gc.freeze`).

    Importing torch and Transformers creates so many objects that the collector takes a seventh of
    the time. Later a full collection of them would stop the process for a quarter of a second.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
