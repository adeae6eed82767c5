"""Runs a long job at a low priority, so that it takes what the rest of the machine leaves.

Linux weighs threads by their nice value only within one scheduling group, and by default makes a
group of every session (`autogroup`). A worker is a session of its own, so both values are set: the
thread's, and the group's for as long as the job runs. A thread can't raise its priority again
without privileges; that is why the job gets a thread of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

_NICE = 10  # about a tenth of a core that others want too
_AUTOGROUP = "/proc/self/autogroup"
_RETRY_S = 0.03
_MAX_TRIES = 50
_Result = TypeVar("_Result")


def run_at_low_priority(function: Callable[[], _Result]) -> _Result:
    """Return what the function returns, and raise what it raises."""
    with (
        _lowering_group(),
        ThreadPoolExecutor(max_workers=1, initializer=_lower_this_thread) as executor,
    ):
        return executor.submit(function).result()


def _lower_this_thread() -> None:
    with suppress(OSError):  # a sandbox may forbid it; the job still has to be done
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


@contextmanager
def _lowering_group() -> Iterator[None]:
    _set_group_priority(_NICE)
    try:
        yield
    finally:
        _set_group_priority(0)


def _set_group_priority(nice: int) -> None:
    for _ in range(_MAX_TRIES):
        try:
            with open(_AUTOGROUP, "w") as file:
                file.write(str(nice))
        except BlockingIOError:  # without privileges, Linux takes one change in 0.1 s, of anybody
            time.sleep(_RETRY_S)
        except OSError:  # not every kernel has such groups
            return
        else:
            return
