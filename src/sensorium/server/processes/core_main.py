"""The process of the core: loads the model, then runs its steps until the parent ends it.

It imports little before it listens to its parent; `core_app` imports everything heavy afterwards.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, NoReturn

from sensorium.server.logs import log_step, set_up_logging
from sensorium.server.processes.control import (
    TO_CORE,
    CoreReady,
    FrontendGone,
    StartCore,
    Stop,
    ToCoreProcess,
    follow_parent,
    open_channel,
    receive_start,
    report_failure,
)
from sensorium.utils.process import report_step, reporting_steps, without_collection

if TYPE_CHECKING:
    from sensorium.engine.core_process.core_loop import CoreLoop

logger = logging.getLogger(__name__)


class CoreProcess:
    """The core's main loop, run by one thread, and controlled by messages in another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: CoreLoop | None = None

    def handle(self, message: ToCoreProcess) -> None:
        """Abort the requests of a frontend that is gone, or stop the main loop.

        While the model is still loading, `Stop` ends the whole process at once.
        """
        with self._lock:
            if isinstance(message, FrontendGone) and self._loop is not None:
                self._loop.forget_frontend(message.identity)
            elif isinstance(message, Stop) and self._loop is not None:
                self._loop.stop()
            elif isinstance(message, Stop):  # loading can't be interrupted
                os._exit(0)

    def run(self, loop: CoreLoop) -> None:
        """Run the main loop, which messages control from now on, until the parent sends `Stop`."""
        with self._lock:
            self._loop = loop
        try:
            loop.run()
        finally:
            with self._lock:
                self._loop = None


def main() -> None:
    """Run a core until the parent's `Stop`, and end the process with status 0 (1 if it fails)."""
    channel = open_channel(TO_CORE)
    start = receive_start(channel, StartCore)
    options = start.options
    set_up_logging("core", log_format=options.log_format, log_level=options.log_level)
    process = CoreProcess()
    follow_parent(channel, process.handle, socket_dir=start.socket_dir)
    try:
        with without_collection(), reporting_steps(log_step):
            report_step("importing PyTorch and Transformers")
            from sensorium.server.processes.core_app import build_core_app

            loop, info, tiers = build_core_app(start)
    except Exception as error:  # the parent has to learn the reason, whatever it is
        report_failure(channel, error)
        _end(1)
    channel.send(CoreReady(info))
    try:
        process.run(loop)
        if tiers is not None:
            tiers.close()
    except Exception:
        logger.exception("the core has failed, and its process ends")
        _end(1)
    _end(0)


def _end(status: int) -> NoReturn:
    """Flush the logs, and end this process at once with an exit status."""
    # A normal exit would take time to free memory of torch, which the system frees anyway.
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
