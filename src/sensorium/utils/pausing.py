"""Work that pauses where it has to wait, so that it holds no thread while it waits.

Pausing work is a generator. It yields each future that it has to wait for, is resumed after that
future has ended, in any thread, and returns its result. Closing it early runs its clean-up.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from concurrent.futures import Future, wait
from contextlib import closing
from typing import Any, TypeVar

T = TypeVar("T")
Pausing = Generator[Future[Any], None, T]


def run_through(work: Pausing[T]) -> T:
    """Run pausing work to its end in this thread, and return its result."""
    with closing(work):  # an interruption of the wait must not leave the work half done
        while True:
            try:
                future = next(work)
            except StopIteration as end:
                result: T = end.value
                return result
            wait([future])


def when_all_end(futures: Iterable[Future[Any]]) -> Future[None]:
    """Return a future that completes when all `futures` are done, failed or cancelled."""
    all_ended: Future[None] = Future()
    lock = threading.Lock()
    left = list(futures)
    num_left = len(left)

    def count_down(_: object) -> None:
        nonlocal num_left
        with lock:
            num_left -= 1
            is_last = num_left == 0
        if is_last:
            all_ended.set_result(None)

    for future in left:
        future.add_done_callback(count_down)
    if not left:
        all_ended.set_result(None)
    return all_ended
