"""The process of a frontend: HTTP in and out, media perceived, requests brought to the core.

Light until it listens to its parent: everything heavy is imported by `frontend_app`, afterwards.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

from sensorium.server.logs import set_up_logging
from sensorium.server.processes.allocator import keep_memory_compact
from sensorium.server.processes.child import (
    follow_parent,
    open_channel,
    receive_start,
    report_failure,
)
from sensorium.server.processes.control import TO_FRONTEND, Drain, StartFrontend, ToFrontend
from sensorium.utils.process import without_collection

# The event loop shares the interpreter with threads that render, hash and tokenise. Each of them
# may keep it for this long after the loop has something to do; Python's own choice is 5 ms.
_SWITCH_INTERVAL_S = 0.001


class Inbox:
    """Messages of the parent: kept until somebody takes them. `add` runs in another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[ToFrontend] = []
        self._deliver: Callable[[ToFrontend], object] | None = None

    def add(self, message: ToFrontend) -> None:
        with self._lock:
            if self._deliver is not None:
                self._deliver(message)
            elif isinstance(message, Drain):  # in the middle of loading: there is nothing to finish
                os._exit(0)
            else:
                self._waiting.append(message)

    def attach(self, deliver: Callable[[ToFrontend], object]) -> None:
        """From now on they go there, first those that wait."""
        with self._lock:
            for message in self._waiting:
                deliver(message)
            self._waiting.clear()
            self._deliver = deliver


def main() -> None:
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
        with without_collection():
            from sensorium.server.processes.frontend_app import build_frontend_app, run_frontend

            half = build_frontend_app(start)
        run_frontend(start, half, channel=channel, inbox_attach=inbox.attach)
    except Exception as error:  # whatever it is, the parent has to hear of it
        report_failure(channel, error)
        status = 1
    # At once: threads that still load or process for nobody must not keep it alive.
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
