"""Runs what recurses as deep as its input says, in native code that checks nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

# Of addresses; memory is what is used of it. The longest chain that a grammar of the greatest
# length can hold takes less than a quarter.
_NUM_BYTES = 2**28
_Result = TypeVar("_Result")
_lock = threading.Lock()


def run_on_large_stack(work: Callable[[], _Result]) -> _Result:
    """In a thread of its own; returns what it returns, and raises what it raises."""
    result: Future[_Result] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    with _lock:  # the size is the process's: others that start a thread meanwhile get it as well
        before = threading.stack_size(_NUM_BYTES)
        try:
            threading.Thread(target=run, name="grammar-stack", daemon=True).start()
        finally:
            threading.stack_size(before)
    return result.result()
