"""The parent of a server's processes, which keeps them alive until it has to stop.

There is one core, or none in a server that only renders, and at least one frontend. The parent
computes nothing and imports neither torch nor Transformers, so it starts at once and stays small.
Children end when it does, because their connections to it end.

Invariants:
  1. Frontends learn of a core's end at once, and of the next core when that is ready.
  2. A core learns of a frontend's end. Identities and sockets are never used twice.
  3. Until the server is ready for the first time, the end of any child ends the server.
  4. When `run` returns or raises, no child is left, and nothing that the children shared.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

from sensorium.engine.core_process import CoreInfo
from sensorium.server.logs import Announcer
from sensorium.server.metrics.metric_set import MetricSet
from sensorium.server.metrics.shared_files import (
    CORE,
    PARENT,
    clear_gauges,
    get_frontend_name,
    log_load,
    use_directory,
)
from sensorium.server.options import MAX_FRONTENDS, ServeOptions
from sensorium.server.processes.control import (
    ChildProcess,
    CoreDown,
    CoreReady,
    CoreResumed,
    CoreStalled,
    CoreUp,
    Drain,
    Failed,
    FromChild,
    FrontendGone,
    Serving,
    StartCore,
    StartFrontend,
    Stop,
)
from sensorium.server.processes.shared_resources import (
    Address,
    SharedResources,
    StallWatch,
    get_look_interval,
    sharing_resources,
)
from sensorium.types.errors import SensoriumError

logger = logging.getLogger(__name__)
_GRACE_S = 20.0  # for processes to end, after the time in which requests may end
_CORE_LOST = "the engine has ended; another one is being started: send the request again"
# Children are fresh interpreters that don't look for modules in the current directory.
_RUN_MODULE = (sys.executable, "-P", "-m")


class ServerFailedError(SensoriumError):
    """An error that means that the server can't be started or kept running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """The command lines of a core and a frontend, without the descriptor that is appended last."""

    core: tuple[str, ...] = (*_RUN_MODULE, "sensorium.server.processes.core_main")
    frontend: tuple[str, ...] = (*_RUN_MODULE, "sensorium.server.processes.frontend_main")


@dataclass(slots=True, kw_only=True)
class RestartPolicy:
    """A rule for when an ended process is started again, and when the server gives up instead.

    The pause before a start doubles with each end of the process, up to `max_pause_s` seconds. The
    rule reads no clock, so that tests can pass any time.
    """

    max_tries: int = 5
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0
    settled_s: float = 60.0  # after a process that lived so long, the tries and pauses begin anew
    _num_ends: int = field(default=0, init=False)

    def note_end(self, *, lived_s: float) -> float | None:
        """Count an end after `lived_s` seconds, and return the seconds before the next start.

        Return `None` after more than `max_tries` ends in a row, each in less than `settled_s`
        seconds.
        """
        if lived_s >= self.settled_s:
            self._num_ends = 0
        self._num_ends += 1
        if self._num_ends > self.max_tries:
            return None
        return min(self.first_pause_s * 2.0 ** (self._num_ends - 1), self.max_pause_s)


class Supervisor:
    """The parent of a server's processes, which starts them and restarts those that end.

    `run` may be called once. `grace_s` is how many seconds processes have to end when the server
    stops.
    """

    def __init__(
        self,
        options: ServeOptions,
        *,
        commands: Commands | None = None,
        make_policy: Callable[[], RestartPolicy] = RestartPolicy,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._options = options
        self._commands = commands or Commands()
        self._make_policy = make_policy
        self._grace_s = grace_s
        self._announcer = Announcer(options)
        # Children find the modules that this process finds, even if its directory is removed later.
        self._python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._address: Address  # this and the next two exist while `run` runs
        self._shared: SharedResources
        self._metrics: MetricSet
        self._children: set[ChildProcess] = set()
        self._core: ChildProcess | None = None
        self._core_info: CoreInfo | None = None  # of a core that is ready
        self._is_core_stalled = False
        self._frontends: dict[str, ChildProcess] = {}  # identity -> process
        self._serving: set[str] = set()  # identities of frontends that accept connections
        self._is_ready = False
        self._stop = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Run the server until a signal stops it, and return its exit status.

        After SIGINT or SIGTERM the server finishes the requests in flight, and the status is 0. A
        second signal kills all processes, and the status is 128 + its number. Raise a
        `SensoriumError` if the server can't be started or kept running.
        """
        self._address = Address.bind(self._options.host, self._options.port)
        with (
            closing(self._address),
            sharing_resources(self._options) as self._shared,
            self._handling_signals(),
        ):
            self._announcer.announce_start()
            use_directory(self._shared.metrics_directory, writer=PARENT)
            self._metrics = MetricSet(self._options.model_names[0])
            cores = []
            if not self._options.is_render_only:
                cores.append(asyncio.create_task(self._keep("core", self._live_core)))
            frontends = [
                asyncio.create_task(self._keep("frontend", partial(self._live_frontend, index)))
                for index in range(self._options.api_server_count)
            ]
            log = asyncio.create_task(log_load(self._shared.metrics_directory))
            try:
                await self._wait_for_stop([*cores, *frontends])
                await self._drain(cores, frontends)
            finally:
                log.cancel()
                await self._end_all([*cores, *frontends, log])
        return self._status

    # ---- keeping processes alive

    async def _keep(
        self, kind: Literal["core", "frontend"], live: Callable[[int], Awaitable[str]]
    ) -> None:
        """Run a process, and start it again each time it ends, until the server stops.

        `live` is called with the number of the start, from 1, and returns how the process ended.
        Raise a `ServerFailedError` if a process ends before the server is ready, or too often.
        """
        policy = self._make_policy()
        for life in count(1):
            begun = time.monotonic()
            try:
                end = await live(life)
            except OSError as error:  # the system has no room for a process
                end = f"a {kind} process can't be started: {error}"
            if self._stop.is_set():
                return
            if not self._is_ready:
                raise ServerFailedError(end)
            pause_s = policy.note_end(lived_s=time.monotonic() - begun)
            if pause_s is None:
                raise ServerFailedError(
                    f"a {kind} process was started again {policy.max_tries} times in a row and "
                    f"always ended soon; the last time: {end}"
                )
            logger.error("%s; it is started again in %.1f s", end, pause_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)
                return
            self._metrics.counter("sensorium:process_restarts_total", kind).inc()

    async def _live_core(self, life: int) -> str:
        start = StartCore(
            options=self._options,
            socket_dir=str(self._shared.directory),
            life=life,
            shm_fd=self._shared.shm_fd,
            pulse_fd=self._shared.pulse.fd if self._options.core_stall_timeout else None,
        )
        self._shared.pulse.clear()
        command = self._commands.core
        inherited_fds = () if start.pulse_fd is None else (start.pulse_fd,)
        self._core = core = await self._spawn(CORE, command, start, inherited_fds)
        watch = asyncio.create_task(self._watch_core(core))

        def forget() -> None:
            watch.cancel()
            self._core = self._core_info = None
            self._is_core_stalled = False
            self._inform_frontends(CoreDown(_CORE_LOST))
            Path(start.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

        return await self._follow(core, self._on_core_message, forget)

    async def _watch_core(self, core: ChildProcess) -> None:
        """Report to the frontends if the core stalls or resumes, and kill it if it is lost."""
        limit_s = self._options.core_stall_timeout
        watch = StallWatch(limit_s)
        while limit_s:  # 0: no core is watched; the task is cancelled when the core has ended
            await asyncio.sleep(get_look_interval(limit_s))
            if self._core_info is None:  # a core that is still loading is not watched
                continue
            verdict = watch.look(time.monotonic(), self._shared.pulse.read())
            if verdict == "lost":
                logger.error("the core made no progress for %g s and is killed", 2 * limit_s)
                core.kill()
                return
            if (verdict == "stalled") != self._is_core_stalled:
                self._note_stall(is_stalled=verdict == "stalled")

    def _note_stall(self, *, is_stalled: bool) -> None:
        self._is_core_stalled = is_stalled
        if is_stalled:
            self._metrics.counter("sensorium:core_stalls_total").inc()
            limit_s = self._options.core_stall_timeout
            logger.error(
                "the core has made no progress for %g s; it is killed if that continues", limit_s
            )
        else:
            logger.warning("the core makes progress again")
        self._inform_frontends(CoreStalled() if is_stalled else CoreResumed())

    async def _live_frontend(self, index: int, life: int) -> str:
        identity = f"f{index}-{life}"
        start = StartFrontend(
            options=self._options,
            index=index,
            identity=identity,
            listen_fd=self._address.listener.fileno(),
            counts_fd=self._shared.request_counts.fd,
            socket_dir=str(self._shared.directory),
            shm_fd=self._shared.shm_fd,
            is_restart=life > 1,
        )
        name = get_frontend_name(index)
        inherited_fds = (start.listen_fd, start.counts_fd)
        frontend = await self._spawn(name, self._commands.frontend, start, inherited_fds)
        self._frontends[identity] = frontend
        if self._core_info is not None:
            frontend.send(CoreUp(self._core_info))
            if self._is_core_stalled:
                frontend.send(CoreStalled())

        def forget() -> None:
            del self._frontends[identity]
            self._serving.discard(identity)
            if self._core is not None:
                self._core.send(FrontendGone(identity))

        def handle(message: FromChild) -> None:
            if isinstance(message, Serving):
                self._serving.add(identity)
                self._on_serving(name, message)

        end = await self._follow(frontend, handle, forget)
        counts = self._shared.request_counts.values
        counts[index] = counts[MAX_FRONTENDS + index] = 0.0  # its requests have ended with it
        return end

    async def _spawn(
        self,
        name: str,
        command: Sequence[str],
        start: StartCore | StartFrontend,
        inherited_fds: Sequence[int],
    ) -> ChildProcess:
        """Start a child process and send it `start`; kill it if the server is stopping."""
        if self._shared.shm_fd is not None:
            inherited_fds = (*inherited_fds, self._shared.shm_fd)
        # The directory of the metrics is in the environment, where `use_directory` has put it.
        environment = os.environ | {"PYTHONPATH": self._python_path}
        child = await ChildProcess.spawn(
            name, command, inherited_fds=inherited_fds, environment=environment
        )
        self._children.add(child)
        child.send(start)
        if self._stop.is_set():
            child.kill()
        return child

    async def _follow(
        self, child: ChildProcess, handle: Callable[[FromChild], None], forget: Callable[[], None]
    ) -> str:
        """Handle the messages of a child until its process has ended, and return how it ended.

        The result is the reason that the child sent, or its exit status in words.
        """
        failure = None
        while (message := await child.receive()) is not None:
            if isinstance(message, Failed):
                failure = message.message
            else:
                handle(message)
        forget()  # as soon as the connection has ended, which may be earlier than the process
        end = await child.wait_until_ended()
        self._children.discard(child)
        clear_gauges(child.name, self._shared.metrics_directory)
        return failure or f"the process of {child.name} ended with {end}"

    def _on_core_message(self, message: FromChild) -> None:
        if not isinstance(message, CoreReady):
            return
        self._core_info = message.info
        if self._is_ready:
            logger.info("the core is ready again")
        else:
            self._announcer.announce_core(message.info.description)
        self._inform_frontends(CoreUp(message.info))

    def _inform_frontends(
        self, message: CoreUp | CoreDown | CoreStalled | CoreResumed | Drain
    ) -> None:
        for frontend in self._frontends.values():
            frontend.send(message)

    def _on_serving(self, name: str, message: Serving) -> None:
        if self._is_ready:
            logger.info("%s serves again", name)
        elif len(self._serving) == self._options.api_server_count:
            self._is_ready = True
            if self._options.is_render_only:
                self._announcer.announce_core(message.description)
            self._announcer.announce_ready(self._address.url)

    # ---- stopping

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            logger.info(
                "%s: waiting for requests in flight; a second signal kills them", number.name
            )
            self._stop.set()
            return
        self._status = 128 + number
        self._kill_all()

    def _kill_all(self) -> None:
        for child in self._children:
            child.kill()

    async def _wait_for_stop(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([stop, *keepers], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        for keeper in done - {stop}:
            keeper.result()  # raises, because a keeper ends by itself only on failure

    async def _drain(
        self, cores: Sequence[asyncio.Task[None]], frontends: Sequence[asyncio.Task[None]]
    ) -> None:
        self._address.close()
        self._inform_frontends(Drain())
        _, pending = await asyncio.wait(
            frontends, timeout=self._options.shutdown_timeout + self._grace_s
        )
        if pending:
            logger.warning("%d frontend(s) did not end in time and are killed", len(pending))
            for frontend in self._frontends.values():
                frontend.kill()
            await asyncio.wait(pending)
        if self._core is not None:
            self._core.send(Stop())
        if cores:
            await asyncio.wait(cores, timeout=self._grace_s)

    async def _end_all(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        self._stop.set()
        self._kill_all()
        await asyncio.gather(*keepers, return_exceptions=True)
