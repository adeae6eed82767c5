"""Runs the process of a core for an engine of a cluster, and watches it.

The core is the same as that of a server. Ray watches the engine, so a core that ends is not started
again here: the engine reports that it is not healthy, its requests fail with an error that clients
may answer by trying again, and Ray replaces it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from sensorium.engine.core_process import CoreInfo
from sensorium.server.metrics.shared_files import CORE, get_frontend_name, use_directory
from sensorium.server.options import ServeOptions
from sensorium.server.processes.control import ChildProcess, CoreReady, Failed, StartCore, Stop
from sensorium.server.processes.shared_resources import (
    SharedResources,
    StallWatch,
    get_look_interval,
    sharing_resources,
)
from sensorium.server.processes.supervisor import Commands
from sensorium.types.errors import EngineLostError, ModelError
from sensorium.utils.openmp import get_wait_variables

logger = logging.getLogger(__name__)
_END_S = 20.0


class CoreHost:
    """The process of one core, and the memory and files that this process shares with it.

    `on_end` is called with the reason when the core has ended by itself. All calls must be on one
    event loop.
    """

    def __init__(self, options: ServeOptions, *, on_end: Callable[[str], None]) -> None:
        self.end: str | None = None  # how the core has ended
        self.is_stalled = False
        self._options = options
        self._on_end = on_end
        self._stack = ExitStack()
        self._shared: SharedResources = self._stack.enter_context(sharing_resources(options))
        use_directory(self._shared.metrics_directory, writer=get_frontend_name(0))
        self._core: ChildProcess | None = None
        self._ready: asyncio.Future[CoreInfo] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False

    @property
    def shm_fd(self) -> int | None:
        return self._shared.shm_fd

    async def start(self) -> None:
        limit_s = self._options.core_stall_timeout
        start = StartCore(
            options=self._options,
            socket_dir=str(self._shared.directory),
            life=1,
            shm_fd=self._shared.shm_fd,
            pulse_fd=self._shared.pulse.fd if limit_s else None,
        )
        inherited = (start.shm_fd, start.pulse_fd)
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._core = await ChildProcess.spawn(
            CORE,
            Commands().core,
            inherited_fds=[fd for fd in inherited if fd is not None],
            environment=os.environ | get_wait_variables(os.environ) | {"PYTHONPATH": path},
        )
        self._core.send(start)
        self._tasks.append(asyncio.create_task(self._follow(self._core)))
        if limit_s:
            self._tasks.append(asyncio.create_task(self._watch(self._core, limit_s)))

    async def wait_until_ready(self) -> CoreInfo:
        """Wait until the model is loaded. Raise a `ModelError` if that has failed."""
        return await asyncio.shield(self._ready)

    def check(self) -> None:
        """Raise an `EngineLostError` if the core has ended or makes no progress."""
        if self.end is not None:
            raise EngineLostError(f"the core of this engine has ended: {self.end}")
        if self.is_stalled:
            raise EngineLostError("the core of this engine makes no progress")

    async def close(self) -> None:
        """End the core, and free the memory and files that were shared with it."""
        self._is_closing = True
        if self._core is not None:
            self._core.send(Stop())
            follow, *others = self._tasks
            for task in others:
                task.cancel()
            done, _ = await asyncio.wait([follow], timeout=_END_S)
            if not done:
                self._core.kill()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._stack.close()

    async def _follow(self, core: ChildProcess) -> None:
        reason = None
        while (message := await core.receive()) is not None:
            if isinstance(message, CoreReady):
                self._ready.set_result(message.info)
            elif isinstance(message, Failed):
                reason = message.message
        status = await core.wait_until_ended()
        self.end = reason or f"its process ended with {status}"
        if not self._ready.done():
            self._ready.set_exception(ModelError(self.end))
        elif not self._is_closing:
            logger.error("the core of this engine has ended: %s", self.end)
            self._on_end(self.end)

    async def _watch(self, core: ChildProcess, limit_s: float) -> None:
        """Watch the core: set `is_stalled` if it makes no progress, and kill it if it is lost."""
        watch = StallWatch(limit_s)
        while True:
            await asyncio.sleep(get_look_interval(limit_s))
            if not self._ready.done():
                continue
            verdict = watch.look(time.monotonic(), self._shared.pulse.read())
            self.is_stalled = verdict != "moves"
            if verdict == "lost":
                logger.error("the core made no progress for %g s and is killed", 2 * limit_s)
                core.kill()
                return
