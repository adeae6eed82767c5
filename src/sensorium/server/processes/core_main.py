"""The process of the core: loads the model, then steps until the parent says that it is enough.

Light until it listens to its parent: everything heavy is imported by `core_app`, afterwards.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, NoReturn

from sensorium.server.logs import set_up_logging
from sensorium.server.processes.child import (
    follow_parent,
    open_channel,
    receive_start,
    report_failure,
)
from sensorium.server.processes.control import (
    TO_CORE,
    CoreReady,
    FrontendGone,
    StartCore,
    Stop,
    ToCoreProcess,
)
from sensorium.utils.process import without_collection

if TYPE_CHECKING:
    from sensorium.engine.core_process.core_loop import CoreLoop

logger = logging.getLogger(__name__)


class CoreProcess:
    """What the parent says, and the loop that it is about. `handle` runs in another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: CoreLoop | None = None

    def handle(self, message: ToCoreProcess) -> None:
        with self._lock:
            if isinstance(message, FrontendGone) and self._loop is not None:
                self._loop.forget_frontend(message.identity)
            elif isinstance(message, Stop) and self._loop is not None:
                self._loop.stop()
            elif isinstance(message, Stop):  # in the middle of loading, which can't be asked to end
                os._exit(0)

    def run(self, loop: CoreLoop) -> None:
        """Until `Stop`. Nothing may be asked of a loop that has ended."""
        with self._lock:
            self._loop = loop
        try:
            loop.run()
        finally:
            with self._lock:
                self._loop = None


def main() -> None:
    channel = open_channel(TO_CORE)
    start = receive_start(channel, StartCore)
    options = start.options
    set_up_logging("core", log_format=options.log_format, log_level=options.log_level)
    process = CoreProcess()
    follow_parent(channel, process.handle, socket_dir=start.socket_dir)
    try:
        with without_collection():
            from sensorium.server.processes.core_app import build_core_app

            loop, info = build_core_app(start)
    except Exception as error:  # whatever it is, the parent has to hear of it
        report_failure(channel, error)
        _end(1)
    channel.send(CoreReady(info))
    try:
        process.run(loop)
    except Exception:
        logger.exception("the core has failed")
        _end(1)
    _end(0)


def _end(status: int) -> NoReturn:
    """At once: taking torch down takes time, and all that is left is memory."""
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
