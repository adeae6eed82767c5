"""Runs a function on a large stack, for native code that recurses as deep as its input is nested.

Such code does not check for the end of the stack.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

# This many addresses are reserved, but memory is taken only for those that are used. The deepest
# nesting that fits into a grammar of the greatest length needs less than a quarter of them.
_NUM_BYTES = 2**28
_Result = TypeVar("_Result")
_lock = threading.Lock()


def run_on_large_stack(work: Callable[[], _Result]) -> _Result:
    """Run `work` in a thread with a large stack. Return its result, or raise its error."""
    result: Future[_Result] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    # The stack size is a setting of the whole process. The lock keeps concurrent calls from
    # restoring a wrong size. Other code that starts a thread meanwhile gets the large stack too.
    with _lock:
        before = threading.stack_size(_NUM_BYTES)
        try:
            threading.Thread(target=run, name="grammar-stack", daemon=True).start()
        finally:
            threading.stack_size(before)
    return result.result()
