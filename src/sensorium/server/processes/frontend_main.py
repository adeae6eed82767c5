"""The process of a frontend: serves HTTP, processes media and sends requests to the core.

It imports little before it listens to its parent; `frontend_app` imports everything heavy
afterwards.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable

from sensorium.server.logs import log_step, set_up_logging
from sensorium.server.processes.control import (
    TO_FRONTEND,
    Drain,
    StartFrontend,
    ToFrontend,
    follow_parent,
    open_channel,
    receive_start,
    report_failure,
)
from sensorium.utils.process import reporting_steps, without_collection

# The event loop shares the interpreter with threads that render, hash and tokenise. Each of them
# may hold the interpreter for this long while the loop waits for it. Python's default is 5 ms.
_SWITCH_INTERVAL_S = 0.001
# Options of glibc's `mallopt`, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 2**23
_MAX_FREE_BYTES = 2**26  # at the end of an arena
_MAX_ARENAS = 2


class Inbox:
    """A thread-safe buffer of the parent's messages until the frontend can handle them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[ToFrontend] = []
        self._deliver: Callable[[ToFrontend], object] | None = None

    def add(self, message: ToFrontend) -> None:
        """Pass a message to the attached function. Without one, keep it, or exit at a `Drain`."""
        with self._lock:
            if self._deliver is not None:
                self._deliver(message)
            elif isinstance(message, Drain):  # it still loads, so there is nothing to finish
                os._exit(0)
            else:
                self._waiting.append(message)

    def attach(self, deliver: Callable[[ToFrontend], object]) -> None:
        """Call `deliver` with each message that was kept, and from now on with each new one."""
        with self._lock:
            for message in self._waiting:
                deliver(message)
            self._waiting.clear()
            self._deliver = deliver


def main() -> None:
    """Run a frontend until it has drained, and end the process with status 0 (1 if it fails)."""
    channel = open_channel(TO_FRONTEND)
    start = receive_start(channel, StartFrontend)
    options = start.options
    set_up_logging(
        f"frontend-{start.index}",
        log_format=options.log_format,
        log_level=options.log_level,
        access_log=options.access_log,
    )
    inbox = Inbox()
    follow_parent(channel, inbox.add, socket_dir=start.socket_dir)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    keep_memory_compact()
    status = 0
    try:
        with without_collection(), reporting_steps(log_step):
            from sensorium.server.processes.frontend_app import build_frontend_app, run_frontend

            app = build_frontend_app(
                options, identity=start.identity, index=start.index, shm_fd=start.shm_fd
            )
        run_frontend(start, app, channel=channel, attach=inbox.attach)
    except Exception as error:  # the parent has to learn the reason, whatever it is
        report_failure(channel, error)
        status = 1
    # End at once, so that threads that still load or process do not keep the process alive.
    logging.shutdown()
    os._exit(status)


def keep_memory_compact() -> None:
    """Make glibc's allocator return the memory of bodies and media to the system."""
    # By default glibc keeps freed blocks of up to 32 MiB in its arenas, and has several arenas for
    # each CPU core. With many threads that allocate megabytes, hundreds of megabytes would stay
    # unused. Not everything is returned: the system takes 0.6 ms to give a megabyte of new memory,
    # and a body with an image is copied several times.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # None: another C library
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MAX_FREE_BYTES)
        mallopt(_M_ARENA_MAX, _MAX_ARENAS)


if __name__ == "__main__":
    main()
